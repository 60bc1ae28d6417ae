-- What an operator needs: order, limits, owners, expiry, resuming, webhooks.

ALTER TABLE jobs ADD COLUMN priority INTEGER NOT NULL DEFAULT 0;       -- higher runs first
ALTER TABLE jobs ADD COLUMN owner TEXT;                                -- sha256 of the API key that submitted it
ALTER TABLE jobs ADD COLUMN deadline_seconds REAL;                     -- longest run, time in the queue not counted
ALTER TABLE jobs ADD COLUMN expires_at REAL;                           -- record and files go then; set when it ends
ALTER TABLE jobs ADD COLUMN checkpoint_step INTEGER NOT NULL DEFAULT 0; -- denoise steps that need not run again
ALTER TABLE jobs ADD COLUMN preview_step INTEGER NOT NULL DEFAULT 0;   -- step of the newest preview picture
ALTER TABLE jobs ADD COLUMN webhook_url TEXT;
ALTER TABLE jobs ADD COLUMN steps_run INTEGER NOT NULL DEFAULT 0;      -- denoise steps of this attempt

DROP INDEX jobs_by_status;
CREATE INDEX jobs_by_status ON jobs (status, model, priority DESC, id);
CREATE INDEX jobs_by_owner ON jobs (owner, id);
CREATE INDEX jobs_by_expiry ON jobs (expires_at) WHERE expires_at IS NOT NULL;

-- What a shape costs, so that shapes that never ran can be estimated from those that did.
ALTER TABLE shape_timings ADD COLUMN model TEXT;
ALTER TABLE shape_timings ADD COLUMN tokens INTEGER;
ALTER TABLE shape_timings ADD COLUMN passes INTEGER;                   -- of the transformer, per step
ALTER TABLE shape_timings ADD COLUMN density REAL;                     -- attended share of token pairs, all calls
ALTER TABLE shape_timings ADD COLUMN peak_memory_bytes INTEGER;

ALTER TABLE workers ADD COLUMN memory_total_bytes INTEGER;             -- of the device; NULL: not known
ALTER TABLE workers ADD COLUMN memory_in_use_bytes INTEGER;

-- Webhooks that were not delivered yet. A row is written in the transaction that ends its job.
CREATE TABLE webhooks (
    id              TEXT PRIMARY KEY,               -- the webhook-id header; the same in every try
    job_id          TEXT NOT NULL,
    event           TEXT NOT NULL,                  -- video.completed, video.failed, video.cancelled
    url             TEXT NOT NULL,
    created_at      REAL NOT NULL,
    tries           INTEGER NOT NULL DEFAULT 0,
    tried_at        REAL NOT NULL,                  -- the last try, or created_at: shows a clock set back
    next_try_at     REAL NOT NULL
) STRICT;
