-- The tables of server/sql/sqlite in PostgreSQL, and what ties them to procrastinate's, which are there already.
-- Times are seconds since 1970 (UTC) by this server's clock. Text that is ordered or compared is ordered by bytes.

CREATE FUNCTION reelwright_now() RETURNS DOUBLE PRECISION LANGUAGE SQL VOLATILE
AS $$ SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION) $$;

CREATE TABLE jobs (
    id                TEXT COLLATE "C" PRIMARY KEY,
    version           BIGINT NOT NULL DEFAULT 1,
    status            TEXT NOT NULL DEFAULT 'queued'
                      CHECK (status IN ('queued', 'in_progress', 'completed', 'failed', 'cancelled')),
    model             TEXT COLLATE "C" NOT NULL,
    parameters        TEXT NOT NULL,
    attention_asked   TEXT,
    metadata          TEXT NOT NULL,
    idempotency_key   TEXT UNIQUE,
    request_sha256    TEXT NOT NULL,
    shape             TEXT COLLATE "C" NOT NULL,
    total_steps       BIGINT NOT NULL,
    attempt           BIGINT NOT NULL DEFAULT 0,
    losses            BIGINT NOT NULL DEFAULT 0,
    cancel_requested  BIGINT NOT NULL DEFAULT 0,
    stage             TEXT,
    step              BIGINT NOT NULL DEFAULT 0,
    progress          BIGINT NOT NULL DEFAULT 0,
    last_step_seconds DOUBLE PRECISION,
    denoise_seconds   DOUBLE PRECISION NOT NULL DEFAULT 0,
    created_at        DOUBLE PRECISION NOT NULL,
    started_at        DOUBLE PRECISION,
    completed_at      DOUBLE PRECISION,
    error             TEXT,
    result            TEXT,
    priority          BIGINT NOT NULL DEFAULT 0,
    owner             TEXT COLLATE "C",
    deadline_seconds  DOUBLE PRECISION,
    expires_at        DOUBLE PRECISION,
    checkpoint_step   BIGINT NOT NULL DEFAULT 0,
    preview_step      BIGINT NOT NULL DEFAULT 0,
    webhook_url       TEXT,
    steps_run         BIGINT NOT NULL DEFAULT 0,
    warnings          TEXT NOT NULL DEFAULT '[]',
    worker            TEXT COLLATE "C"
);

CREATE INDEX jobs_by_status ON jobs (status, model, priority DESC, id);
CREATE INDEX jobs_by_completion ON jobs (model, id DESC) WHERE status = 'completed';
CREATE INDEX jobs_by_owner ON jobs (owner, id);
CREATE INDEX jobs_by_expiry ON jobs (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE shape_timings (
    shape             TEXT COLLATE "C" PRIMARY KEY,
    step_seconds      DOUBLE PRECISION NOT NULL,
    other_seconds     DOUBLE PRECISION NOT NULL,
    model             TEXT COLLATE "C",
    tokens            BIGINT,
    passes            BIGINT,
    density           DOUBLE PRECISION,
    peak_memory_bytes BIGINT
);

CREATE TABLE workers (
    name                TEXT COLLATE "C" PRIMARY KEY,
    state               TEXT NOT NULL,
    message             TEXT NOT NULL,
    model               TEXT NOT NULL,
    device              TEXT,
    dtype               TEXT,
    load_seconds        DOUBLE PRECISION,
    supervisor_pid      BIGINT NOT NULL,
    worker_pid          BIGINT,
    heartbeat_at        DOUBLE PRECISION NOT NULL,
    memory_total_bytes  BIGINT,
    gpus                BIGINT NOT NULL,
    memory_in_use       TEXT                           -- JSON: bytes by device
);

CREATE TABLE samples (
    metric TEXT COLLATE "C" NOT NULL,
    labels TEXT COLLATE "C" NOT NULL,
    value  DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (metric, labels)
);

CREATE TABLE buckets (
    metric      TEXT COLLATE "C" NOT NULL,
    labels      TEXT COLLATE "C" NOT NULL,
    upper_bound DOUBLE PRECISION NOT NULL,
    count       BIGINT NOT NULL,
    PRIMARY KEY (metric, labels, upper_bound)
);

CREATE TABLE webhooks (
    id            TEXT COLLATE "C" PRIMARY KEY,
    job_id        TEXT COLLATE "C" NOT NULL,
    event         TEXT NOT NULL,
    url           TEXT NOT NULL,
    created_at    DOUBLE PRECISION NOT NULL,
    tries         BIGINT NOT NULL DEFAULT 0,
    tried_at      DOUBLE PRECISION NOT NULL,
    next_try_at   DOUBLE PRECISION NOT NULL,
    claimed_until DOUBLE PRECISION
);

CREATE INDEX webhooks_by_job ON webhooks (job_id);

-- Which row of procrastinate_jobs is that of a waiting or running job.
CREATE TABLE queue_rows (
    job_id   TEXT COLLATE "C" PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    queue_id BIGINT NOT NULL UNIQUE REFERENCES procrastinate_jobs (id) ON DELETE CASCADE
);

-- Which row of procrastinate_workers is that of a worker slot.
CREATE TABLE queue_workers (
    name      TEXT COLLATE "C" PRIMARY KEY,
    worker_id BIGINT NOT NULL REFERENCES procrastinate_workers (id) ON DELETE CASCADE
);

-- Event streams in any API process see every change of a job at once.
CREATE FUNCTION reelwright_tell_of_changes() RETURNS TRIGGER LANGUAGE plpgsql
AS $$ BEGIN PERFORM pg_notify('reelwright_changes', ''); RETURN NULL; END; $$;

CREATE TRIGGER reelwright_jobs_changed AFTER INSERT OR UPDATE OR DELETE ON jobs
FOR EACH STATEMENT EXECUTE FUNCTION reelwright_tell_of_changes();
