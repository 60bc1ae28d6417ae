-- name: forget_all
DELETE FROM workers;

-- name: forget
DELETE FROM workers WHERE name = :name;

-- name: forget_silent
DELETE FROM workers WHERE heartbeat_at < :since;

-- name: report
INSERT INTO workers (name, state, message, model, device, dtype, load_seconds, supervisor_pid, worker_pid,
                     memory_total_bytes, gpus, memory_in_use, files, heartbeat_at)
VALUES (:name, :state, :message, :model, :device, :dtype, :load_seconds, :supervisor_pid, :worker_pid,
        :memory_total_bytes, :gpus, :memory_in_use, :files, :now)
ON CONFLICT (name) DO UPDATE SET
    state = excluded.state, message = excluded.message, model = excluded.model, device = excluded.device,
    dtype = excluded.dtype, load_seconds = excluded.load_seconds,
    supervisor_pid = excluded.supervisor_pid, worker_pid = excluded.worker_pid,
    memory_total_bytes = excluded.memory_total_bytes, gpus = excluded.gpus,
    memory_in_use = excluded.memory_in_use, files = excluded.files,
    heartbeat_at = excluded.heartbeat_at;

-- name: all
SELECT * FROM workers ORDER BY name;
