-- name: submit
-- No row when the idempotency key was used before.
INSERT INTO jobs (id, model, parameters, attention_asked, metadata, idempotency_key, request_sha256, shape,
                  total_steps, created_at)
VALUES (:id, :model, :parameters, :attention_asked, :metadata, :idempotency_key, :request_sha256, :shape,
        :total_steps, :now)
ON CONFLICT (idempotency_key) DO NOTHING
RETURNING *;

-- name: get_by_idempotency_key
SELECT * FROM jobs WHERE idempotency_key = :idempotency_key;

-- name: get
SELECT * FROM jobs WHERE id = :id;

-- name: list_newest_first
SELECT * FROM jobs
WHERE (:after IS NULL OR id < :after) AND (:status IS NULL OR status = :status)
ORDER BY id DESC LIMIT :limit;

-- name: list_oldest_first
SELECT * FROM jobs
WHERE (:after IS NULL OR id > :after) AND (:status IS NULL OR status = :status)
ORDER BY id LIMIT :limit;

-- name: queue
-- Position from 1, and the seconds until the job's end if every shape ahead was measured before.
SELECT jobs.id,
       ROW_NUMBER() OVER ahead AS position,
       SUM(total_steps * step_seconds + other_seconds) OVER ahead AS seconds,
       COUNT(step_seconds) OVER ahead AS measured
FROM jobs LEFT JOIN shape_timings USING (shape)
WHERE status = 'queued' AND model = :model
WINDOW ahead AS (ORDER BY jobs.id);

-- name: timing
SELECT step_seconds, other_seconds FROM shape_timings WHERE shape = :shape;

-- name: running
SELECT * FROM jobs WHERE status = 'in_progress' ORDER BY id;

-- name: counts
SELECT model, status, COUNT(*) AS count, MIN(created_at) AS oldest FROM jobs
WHERE status IN ('queued', 'in_progress') GROUP BY model, status;

-- name: recent_completed
SELECT * FROM jobs WHERE status = 'completed' AND model = :model ORDER BY id DESC LIMIT :limit;

-- name: completed_attempts
SELECT id, attempt FROM jobs WHERE status = 'completed';

-- name: request_cancel
UPDATE jobs SET
    version = version + 1,
    cancel_requested = 1,
    status = CASE status WHEN 'queued' THEN 'cancelled' ELSE status END,
    completed_at = CASE status WHEN 'queued' THEN :now END
WHERE id = :id AND (status = 'queued' OR (status = 'in_progress' AND cancel_requested = 0))
RETURNING *;

-- name: delete
DELETE FROM jobs WHERE id = :id RETURNING *;

-- name: claim
UPDATE jobs SET
    version = version + 1, status = 'in_progress', attempt = attempt + 1, started_at = :now,
    stage = NULL, step = 0, progress = 0, last_step_seconds = NULL, denoise_seconds = 0
WHERE status = 'queued'
  AND id = (SELECT id FROM jobs WHERE status = 'queued' AND model = :model ORDER BY id LIMIT 1)
RETURNING *;

-- The statements below are the worker's: each carries the fence, and returns no row when the job was
-- taken away from this attempt (deleted, lost, or claimed again).

-- name: enter_stage
UPDATE jobs SET version = version + 1, stage = :stage, progress = MAX(progress, :progress)
WHERE id = :id AND attempt = :attempt AND status = 'in_progress'
RETURNING *;

-- name: finish_step
UPDATE jobs SET
    version = version + 1, step = :step, progress = MAX(progress, :progress),
    last_step_seconds = :seconds, denoise_seconds = denoise_seconds + :seconds
WHERE id = :id AND attempt = :attempt AND status = 'in_progress'
RETURNING *;

-- name: held
SELECT * FROM jobs WHERE id = :id AND attempt = :attempt AND status = 'in_progress';

-- name: complete
UPDATE jobs SET
    version = version + 1, status = 'completed', stage = NULL, progress = 100, completed_at = :now,
    result = :result
WHERE id = :id AND attempt = :attempt AND status = 'in_progress'
RETURNING *;

-- name: fail
UPDATE jobs SET
    version = version + 1, status = 'failed', stage = NULL, completed_at = :now, error = :error
WHERE id = :id AND attempt = :attempt AND status = 'in_progress'
RETURNING *;

-- name: finish_cancel
UPDATE jobs SET version = version + 1, status = 'cancelled', stage = NULL, completed_at = :now
WHERE id = :id AND attempt = :attempt AND status = 'in_progress'
RETURNING *;

-- name: requeue
UPDATE jobs SET
    version = version + 1, status = 'queued', losses = losses + :loss, started_at = NULL,
    stage = NULL, step = 0, progress = 0, last_step_seconds = NULL, denoise_seconds = 0
WHERE id = :id AND attempt = :attempt AND status = 'in_progress'
RETURNING *;

-- name: record_timing
INSERT INTO shape_timings (shape, step_seconds, other_seconds)
VALUES (:shape, :step_seconds, :other_seconds)
ON CONFLICT (shape) DO UPDATE SET
    step_seconds = (step_seconds + excluded.step_seconds) / 2,
    other_seconds = (other_seconds + excluded.other_seconds) / 2;
