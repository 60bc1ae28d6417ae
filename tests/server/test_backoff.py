"""When to try again."""

from server.backoff import Backoff


def test_the_first_failure_is_retried_at_once_and_waits_double_up_to_the_longest() -> None:
    backoff = Backoff(longest_seconds=6.0)
    assert [backoff.failed() for _ in range(6)] == [0.0, 1.0, 2.0, 4.0, 6.0, 6.0]


def test_a_success_starts_over() -> None:
    backoff = Backoff(longest_seconds=60.0)
    for _ in range(40):
        backoff.failed()
    backoff.succeeded()
    assert backoff.failed() == 0.0
