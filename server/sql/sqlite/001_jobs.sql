-- Times are seconds since 1970 (UTC). JSON columns hold the models of configs/job.py.

CREATE TABLE jobs (
    id                TEXT PRIMARY KEY,             -- sorts by time of submission
    version           INTEGER NOT NULL DEFAULT 1,   -- grows with every change of the row
    status            TEXT NOT NULL DEFAULT 'queued'
                      CHECK (status IN ('queued', 'in_progress', 'completed', 'failed', 'cancelled')),
    model             TEXT NOT NULL,
    parameters        TEXT NOT NULL,                -- JobParameters
    attention_asked   TEXT,                         -- AttentionOverrides of the request
    metadata          TEXT NOT NULL,                -- JSON object of strings, echoed
    idempotency_key   TEXT UNIQUE,                  -- the client's; a repeated submission finds its job
    request_sha256    TEXT NOT NULL,                -- of the request as it was understood
    shape             TEXT NOT NULL,                -- jobs of one shape take the same time per step
    total_steps       INTEGER NOT NULL,
    attempt           INTEGER NOT NULL DEFAULT 0,   -- number of the claim; fences every worker write
    losses            INTEGER NOT NULL DEFAULT 0,   -- attempts whose worker died
    cancel_requested  INTEGER NOT NULL DEFAULT 0,
    stage             TEXT,
    step              INTEGER NOT NULL DEFAULT 0,
    progress          INTEGER NOT NULL DEFAULT 0,
    last_step_seconds REAL,
    denoise_seconds   REAL NOT NULL DEFAULT 0,
    created_at        REAL NOT NULL,
    started_at        REAL,
    completed_at      REAL,
    error             TEXT,
    result            TEXT                          -- JobResult
) STRICT;

CREATE INDEX jobs_by_status ON jobs (status, id);

-- What one job of a shape took, averaged with the newest weighing half: the source of every ETA.
CREATE TABLE shape_timings (
    shape         TEXT PRIMARY KEY,
    step_seconds  REAL NOT NULL,
    other_seconds REAL NOT NULL                     -- everything of a job but its denoise steps
) STRICT;

CREATE TABLE workers (
    name         TEXT PRIMARY KEY,
    state        TEXT NOT NULL,
    message      TEXT NOT NULL,
    model        TEXT NOT NULL,
    device       TEXT,
    dtype        TEXT,
    load_seconds REAL,
    supervisor_pid INTEGER NOT NULL,
    worker_pid   INTEGER,
    heartbeat_at REAL NOT NULL
) STRICT;

-- Metrics outlive the processes that observe them. Labels are a JSON list in the order of the metric.
CREATE TABLE samples (
    metric TEXT NOT NULL,
    labels TEXT NOT NULL,
    value  REAL NOT NULL,                           -- a counter, a gauge, or the sum of a histogram
    PRIMARY KEY (metric, labels)
) STRICT, WITHOUT ROWID;

CREATE TABLE buckets (
    metric      TEXT NOT NULL,
    labels      TEXT NOT NULL,
    upper_bound REAL NOT NULL,
    count       INTEGER NOT NULL,                   -- of this bucket alone, not cumulative
    PRIMARY KEY (metric, labels, upper_bound)
) STRICT, WITHOUT ROWID;
