-- Which database this is, since when it answers, and which workers a job waits for.

ALTER TABLE jobs ADD COLUMN gpus BIGINT;
UPDATE jobs SET gpus = CAST(substring(queue_name FROM '@([0-9]+)$') AS BIGINT)
FROM queue_rows JOIN procrastinate_jobs ON procrastinate_jobs.id = queue_rows.queue_id
WHERE queue_rows.job_id = jobs.id;

ALTER TABLE jobs ADD COLUMN finished_stage TEXT;

ALTER TABLE workers ADD COLUMN files TEXT;

CREATE TABLE identity (
    one        BIGINT PRIMARY KEY DEFAULT 1 CHECK (one = 1),
    id         TEXT NOT NULL,
    seen_at    DOUBLE PRECISION,
    away_from  DOUBLE PRECISION,
    away_until DOUBLE PRECISION
);

INSERT INTO identity (id) VALUES (replace(CAST(gen_random_uuid() AS TEXT), '-', ''));

-- Whether a queued job has a worker changes with the workers, too.
CREATE TRIGGER reelwright_workers_came_or_went AFTER INSERT OR DELETE ON workers
FOR EACH STATEMENT EXECUTE FUNCTION reelwright_tell_of_changes();

CREATE TRIGGER reelwright_workers_changed AFTER UPDATE ON workers
FOR EACH ROW WHEN (OLD.state IS DISTINCT FROM NEW.state OR OLD.gpus IS DISTINCT FROM NEW.gpus)
EXECUTE FUNCTION reelwright_tell_of_changes();
