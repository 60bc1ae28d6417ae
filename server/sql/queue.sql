-- name: next
SELECT id FROM jobs WHERE status = 'queued' AND model = :model ORDER BY priority DESC, id LIMIT 1;

-- The rest is PostgreSQL's: queue_rows and queue_workers say which row of procrastinate's is whose.

-- name: link
INSERT INTO queue_rows (job_id, queue_id) VALUES (:job_id, :queue_id)
ON CONFLICT (job_id) DO UPDATE SET queue_id = excluded.queue_id;

-- name: find
SELECT id, status FROM procrastinate_jobs
WHERE id = (SELECT queue_id FROM queue_rows WHERE job_id = :job_id);

-- name: hold
SELECT id FROM procrastinate_jobs
WHERE id = (SELECT queue_id FROM queue_rows WHERE job_id = :job_id) FOR UPDATE;

-- name: remove
SELECT procrastinate_finish_job_v1(id, 'aborted', TRUE) FROM procrastinate_jobs
WHERE id = (SELECT queue_id FROM queue_rows WHERE job_id = :job_id) AND status IN ('todo', 'doing');

-- name: without_place
SELECT jobs.id, jobs.model, jobs.priority, jobs.gpus FROM jobs
WHERE status = 'queued' AND NOT EXISTS (
    SELECT 1 FROM queue_rows JOIN procrastinate_jobs ON procrastinate_jobs.id = queue_rows.queue_id
    WHERE queue_rows.job_id = jobs.id AND procrastinate_jobs.status = 'todo'
)
ORDER BY jobs.id FOR UPDATE OF jobs SKIP LOCKED;

-- name: beat
UPDATE procrastinate_workers SET last_heartbeat = NOW()
WHERE id = (SELECT worker_id FROM queue_workers WHERE name = :worker)
RETURNING id;

-- name: register
INSERT INTO queue_workers (name, worker_id) VALUES (:worker, :id)
ON CONFLICT (name) DO UPDATE SET worker_id = excluded.worker_id;
