-- A job can be seen by its owner (no owner: by those who send no key) until it expires.

-- name: insert
INSERT INTO jobs (id, model, parameters, attention_asked, metadata, idempotency_key, request_sha256, shape,
                  total_steps, created_at, priority, owner, deadline_seconds, webhook_url, warnings,
                  gpus)
VALUES (:id, :model, :parameters, :attention_asked, :metadata, :idempotency_key, :request_sha256, :shape,
        :total_steps, :now, :priority, :owner, :deadline_seconds, :webhook_url, :warnings,
        :gpus)
RETURNING *;

-- name: free_idempotency_key
-- An expired job that waits for its removal keeps nobody from sending its request again.
UPDATE jobs SET idempotency_key = NULL WHERE idempotency_key = :idempotency_key AND expires_at <= :now;

-- name: get_by_idempotency_key
SELECT * FROM jobs WHERE idempotency_key = :idempotency_key;

-- name: newest_id
SELECT MAX(id) AS id FROM jobs;

-- name: count_queued
SELECT COUNT(*) AS count FROM jobs WHERE status = 'queued' AND model = :model;

-- name: count_unfinished
SELECT COUNT(*) AS count FROM jobs WHERE status IN ('queued', 'in_progress') AND owner = :owner;

-- name: unfinished
SELECT * FROM jobs WHERE status IN ('queued', 'in_progress') AND owner = :owner ORDER BY id;

-- name: get
SELECT * FROM jobs
WHERE id = :id AND owner IS :owner AND (expires_at IS NULL OR expires_at > :now);

-- name: find
SELECT * FROM jobs WHERE id = :id AND (expires_at IS NULL OR expires_at > :now);

-- name: list_newest_first
SELECT * FROM jobs
WHERE owner IS :owner AND (expires_at IS NULL OR expires_at > :now)
  AND (CAST(:after AS TEXT) IS NULL OR id < :after) AND (CAST(:status AS TEXT) IS NULL OR status = :status)
ORDER BY id DESC LIMIT :limit;

-- name: list_oldest_first
SELECT * FROM jobs
WHERE owner IS :owner AND (expires_at IS NULL OR expires_at > :now)
  AND (CAST(:after AS TEXT) IS NULL OR id > :after) AND (CAST(:status AS TEXT) IS NULL OR status = :status)
ORDER BY id LIMIT :limit;

-- name: queue
-- Position from 1 among those that wait for the same workers, and the job's own seconds if they were measured.
SELECT jobs.id, jobs.gpus, jobs.priority,
       ROW_NUMBER() OVER (PARTITION BY jobs.gpus ORDER BY jobs.priority DESC, jobs.id) AS position,
       (total_steps - checkpoint_step) * step_seconds + other_seconds AS seconds
FROM jobs LEFT JOIN shape_timings USING (shape)
WHERE status = 'queued' AND jobs.model = :model
ORDER BY jobs.priority DESC, jobs.id;

-- name: waiting
SELECT model, gpus, COUNT(*) AS count, MIN(created_at) AS oldest FROM jobs
WHERE status = 'queued' GROUP BY model, gpus ORDER BY model, gpus;

-- name: timing
SELECT step_seconds, other_seconds FROM shape_timings WHERE shape = :shape;

-- name: measured_shapes
SELECT shape, step_seconds, other_seconds, tokens, passes, density, peak_memory_bytes FROM shape_timings
WHERE model = :model ORDER BY tokens, shape;

-- name: running
SELECT * FROM jobs WHERE status = 'in_progress' AND (CAST(:worker AS TEXT) IS NULL OR worker = :worker) ORDER BY id;

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
    checkpoint_step = CASE status WHEN 'queued' THEN 0 ELSE checkpoint_step END,
    completed_at = CASE status WHEN 'queued' THEN CAST(:now AS DOUBLE PRECISION) END,
    expires_at = CASE status WHEN 'queued' THEN CAST(:expires_at AS DOUBLE PRECISION) END
WHERE id = :id AND owner IS :owner
  AND (status = 'queued' OR (status = 'in_progress' AND cancel_requested = 0))
RETURNING *;

-- name: delete
DELETE FROM jobs WHERE id = :id AND owner IS :owner AND (expires_at IS NULL OR expires_at > :now)
RETURNING *;

-- name: expired
SELECT id FROM jobs WHERE expires_at <= :now ORDER BY id;

-- name: delete_expired
DELETE FROM jobs WHERE expires_at <= :now RETURNING id;

-- name: claim
UPDATE jobs SET
    version = version + 1, status = 'in_progress', attempt = attempt + 1, started_at = :now, worker = :worker,
    stage = NULL, step = 0, progress = 0, last_step_seconds = NULL, denoise_seconds = 0, steps_run = 0,
    preview_step = 0, finished_stage = NULL
WHERE id = :id AND status = 'queued'
RETURNING *;

-- name: peek
SELECT * FROM jobs WHERE status = 'queued' AND model = :model AND gpus IS :gpus
ORDER BY priority DESC, id LIMIT 1;

-- name: lost
-- Held by a worker that gave no sign of life since then; one of these, or all.
SELECT jobs.id, jobs.attempt, workers.heartbeat_at FROM jobs LEFT JOIN workers ON workers.name = jobs.worker
WHERE jobs.status = 'in_progress' AND (workers.heartbeat_at IS NULL OR workers.heartbeat_at < :since)
  AND (CAST(:id AS TEXT) IS NULL OR jobs.id = :id)
ORDER BY jobs.id;

-- The statements below are the worker's: each carries the fence, and returns no row when the job was
-- taken away from this attempt (deleted, lost, or claimed again).

-- name: enter_stage
UPDATE jobs SET
    version = version + 1, stage = :stage,
    progress = CASE WHEN progress > :progress THEN progress ELSE :progress END
WHERE id = :id AND attempt = :attempt AND status = 'in_progress'
RETURNING *;

-- name: finish_stage
UPDATE jobs SET finished_stage = :stage
WHERE id = :id AND attempt = :attempt AND status = 'in_progress'
RETURNING *;

-- name: finish_step
-- A step that a checkpoint would have saved shows that the checkpoint was of no use.
UPDATE jobs SET
    version = version + 1, step = :step,
    progress = CASE WHEN progress > :progress THEN progress ELSE :progress END,
    last_step_seconds = :seconds, denoise_seconds = denoise_seconds + :seconds, steps_run = steps_run + 1,
    checkpoint_step = CASE WHEN :step <= checkpoint_step THEN 0 ELSE checkpoint_step END
WHERE id = :id AND attempt = :attempt AND status = 'in_progress'
RETURNING *;

-- name: set_checkpoint
UPDATE jobs SET version = version + 1, checkpoint_step = :step
WHERE id = :id AND attempt = :attempt AND status = 'in_progress'
RETURNING *;

-- name: set_preview
UPDATE jobs SET version = version + 1, preview_step = :step
WHERE id = :id AND attempt = :attempt AND status = 'in_progress'
RETURNING *;

-- name: held
SELECT * FROM jobs WHERE id = :id AND attempt = :attempt AND status = 'in_progress';

-- name: complete
UPDATE jobs SET
    version = version + 1, status = 'completed', stage = NULL, progress = 100, checkpoint_step = 0,
    completed_at = :now, expires_at = :expires_at, result = :result
WHERE id = :id AND attempt = :attempt AND status = 'in_progress'
RETURNING *;

-- name: fail
UPDATE jobs SET
    version = version + 1, status = 'failed', stage = NULL, checkpoint_step = 0,
    completed_at = :now, expires_at = :expires_at, error = :error
WHERE id = :id AND attempt = :attempt AND status = 'in_progress'
RETURNING *;

-- name: finish_cancel
UPDATE jobs SET
    version = version + 1, status = 'cancelled', stage = NULL, checkpoint_step = 0,
    completed_at = :now, expires_at = :expires_at
WHERE id = :id AND attempt = :attempt AND status = 'in_progress'
RETURNING *;

-- name: requeue
-- The checkpoint stays: the next attempt starts there.
UPDATE jobs SET
    version = version + 1, status = 'queued', losses = losses + :loss, started_at = NULL,
    stage = NULL, step = 0, progress = 0, last_step_seconds = NULL, denoise_seconds = 0, steps_run = 0,
    preview_step = 0, finished_stage = NULL
WHERE id = :id AND attempt = :attempt AND status = 'in_progress'
RETURNING *;

-- name: record_timing
-- Seconds: the newest job weighs half. Memory: the newest job's peak.
INSERT INTO shape_timings (shape, step_seconds, other_seconds, model, tokens, passes, density,
                           peak_memory_bytes)
VALUES (:shape, :step_seconds, :other_seconds, :model, :tokens, :passes, :density, :peak_memory_bytes)
ON CONFLICT (shape) DO UPDATE SET
    step_seconds = (shape_timings.step_seconds + excluded.step_seconds) / 2,
    other_seconds = (shape_timings.other_seconds + excluded.other_seconds) / 2,
    model = excluded.model, tokens = excluded.tokens, passes = excluded.passes, density = excluded.density,
    peak_memory_bytes = excluded.peak_memory_bytes;
