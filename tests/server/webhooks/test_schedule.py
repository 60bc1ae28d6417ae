"""The times of the tries."""

from server.webhooks.schedule import DELAYS_SECONDS, JITTER, next_delay_seconds


def test_tries_spread_over_a_day_and_end() -> None:
    delays = [next_delay_seconds(tries) for tries in range(1, 20)]
    given = [delay for delay in delays if delay is not None]
    assert delays[: len(given)] == given
    assert len(given) == len(DELAYS_SECONDS)
    assert given == sorted(given) or given[-2:] != sorted(given[-2:])  # the last two have one base
    assert 24 * 3600 <= sum(given) <= (1 + JITTER) * sum(DELAYS_SECONDS)


def test_delays_differ_by_chance_within_the_jitter() -> None:
    delays = [next_delay_seconds(2) or 0.0 for _ in range(50)]
    assert len(set(delays)) > 40
    assert min(delays) >= DELAYS_SECONDS[1]
    assert max(delays) <= (1 + JITTER) * DELAYS_SECONDS[1]
