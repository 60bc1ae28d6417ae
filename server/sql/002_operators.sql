-- What an operator needs: order, limits, owners, expiry, resuming, webhooks.

ALTER TABLE jobs ADD COLUMN priority INTEGER NOT NULL DEFAULT 0;       -- higher runs first
ALTER TABLE jobs ADD COLUMN owner TEXT;                                -- sha256 of the API key that submitted it
ALTER TABLE jobs ADD COLUMN deadline_seconds REAL;                     -- longest run, time in the queue not counted
ALTER TABLE jobs ADD COLUMN expires_at REAL;                           -- record and files go then; set when it ends
ALTER TABLE jobs ADD COLUMN checkpoint_step INTEGER NOT NULL DEFAULT 0; -- denoise steps that need not run again
ALTER TABLE jobs ADD COLUMN preview_step INTEGER NOT NULL DEFAULT 0;   -- step of the newest preview picture
ALTER TABLE jobs ADD COLUMN webhook_url TEXT;

DROP INDEX jobs_by_status;
CREATE INDEX jobs_by_status ON jobs (status, priority DESC, id);
CREATE INDEX jobs_by_owner ON jobs (owner, id);

ALTER TABLE shape_timings ADD COLUMN peak_memory_bytes INTEGER;

-- Webhooks that were not delivered yet. A row is written in the transaction that ends its job.
CREATE TABLE webhooks (
    id              TEXT PRIMARY KEY,               -- the webhook-id header; the same in every try
    job_id          TEXT NOT NULL,
    event           TEXT NOT NULL,                  -- video.completed, video.failed, video.cancelled
    url             TEXT NOT NULL,
    created_at      REAL NOT NULL,
    tries           INTEGER NOT NULL DEFAULT 0,
    next_try_at     REAL NOT NULL
) STRICT;
