-- name: enqueue
INSERT INTO webhooks (id, job_id, event, url, created_at, tried_at, next_try_at)
VALUES (:id, :job_id, :event, :url, :now, :now, :now);

-- name: due (sqlite)
-- A try that lies in the future shows a clock that was set back: then nothing need wait for it.
-- At most :per_site of one host and port: the many of a receiver that does not answer hide no other's.
WITH pending AS (
    SELECT *, replace(replace(lower(substr(url, instr(url, '://') + 3)), '?', '/'), '#', '/') || '/' AS rest
    FROM webhooks WHERE (next_try_at <= :now OR tried_at > :now)
      AND (claimed_until IS NULL OR claimed_until <= :now OR claimed_until > :now + :lease_seconds)
), sited AS (
    SELECT *, substr(rest, 1, instr(rest, '/') - 1) AS site FROM pending
), placed AS (
    SELECT *, ROW_NUMBER() OVER (PARTITION BY site ORDER BY next_try_at, id) AS place FROM sited
)
SELECT id, job_id, event, url, site, created_at, tries, tried_at, next_try_at FROM placed
WHERE place <= :per_site ORDER BY next_try_at, id LIMIT :limit;

-- name: due (postgres)
WITH pending AS (
    SELECT *, substring(lower(url) FROM '://([^/?#]*)') AS site FROM webhooks
    WHERE (next_try_at <= :now OR tried_at > :now)
      AND (claimed_until IS NULL OR claimed_until <= :now OR claimed_until > :now + :lease_seconds)
), placed AS (
    SELECT *, ROW_NUMBER() OVER (PARTITION BY site ORDER BY next_try_at, id) AS place FROM pending
)
SELECT id, job_id, event, url, site, created_at, tries, tried_at, next_try_at FROM placed
WHERE place <= :per_site ORDER BY next_try_at, id LIMIT :limit;

-- name: lease
-- A lease that ends further away than it lasts shows a clock that was set back.
UPDATE webhooks SET claimed_until = :now + :lease_seconds
WHERE id = :id AND (claimed_until IS NULL OR claimed_until <= :now OR claimed_until > :now + :lease_seconds)
RETURNING id;

-- name: release_all
UPDATE webhooks SET claimed_until = NULL WHERE claimed_until IS NOT NULL;

-- name: remove
DELETE FROM webhooks WHERE id = :id RETURNING *;

-- name: put_off
UPDATE webhooks SET
    tries = tries + 1, tried_at = :now, next_try_at = :now + :delay_seconds, claimed_until = NULL
WHERE id = :id
RETURNING *;

-- name: drop_of_job
DELETE FROM webhooks WHERE job_id = :id;

-- name: drop_without_job
DELETE FROM webhooks WHERE NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.id = webhooks.job_id);
