"""Metrics in the database."""

import math

import pytest

from server.database import Database
from server.observations import (
    JOBS_TOTAL,
    PEAK_MEMORY,
    STEP_BUCKETS,
    STEP_DURATION,
    count,
    observe,
    read_buckets,
    read_samples,
    set_gauge,
)


def test_a_counter_adds_up_per_label(database: Database) -> None:
    with database.write() as connection:
        count(connection, JOBS_TOTAL, "a", "completed")
        count(connection, JOBS_TOTAL, "a", "completed")
        count(connection, JOBS_TOTAL, "a", "failed")
    assert read_samples(database, JOBS_TOTAL) == {("a", "completed"): 2.0, ("a", "failed"): 1.0}


def test_a_gauge_keeps_the_last_value(database: Database) -> None:
    with database.write() as connection:
        set_gauge(connection, PEAK_MEMORY, 5.0, "a", "cpu")
        set_gauge(connection, PEAK_MEMORY, 3.0, "a", "cpu")
    assert read_samples(database, PEAK_MEMORY) == {("a", "cpu"): 3.0}


def test_a_histogram_is_cumulative_and_a_bound_belongs_to_its_bucket(database: Database) -> None:
    values = [0.01, 0.05, 0.06, 60.0, 61.0]
    with database.write() as connection:
        for value in values:
            observe(connection, STEP_DURATION, value, "a", "dense")
    buckets = read_buckets(database, STEP_DURATION)["a", "dense"]
    assert [bound for bound, _ in buckets] == [*STEP_BUCKETS, math.inf]
    assert buckets == [(bound, sum(value <= bound for value in values)) for bound, _ in buckets]
    assert read_samples(database, STEP_DURATION) == {("a", "dense"): pytest.approx(sum(values))}


def test_a_clock_that_was_set_back_makes_no_negative_duration(database: Database) -> None:
    with database.write() as connection:
        observe(connection, STEP_DURATION, -5.0, "a", "dense")
    assert read_samples(database, STEP_DURATION) == {("a", "dense"): 0.0}
    assert read_buckets(database, STEP_DURATION)["a", "dense"][0] == (STEP_BUCKETS[0], 1)


def test_a_wrong_number_of_labels_is_an_error(database: Database) -> None:
    with database.write() as connection, pytest.raises(ValueError, match="labels"):
        count(connection, JOBS_TOTAL, "a")
