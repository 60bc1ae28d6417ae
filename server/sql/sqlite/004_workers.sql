-- What several workers and several API processes need. SQLite has one of each; PostgreSQL's tables are the same.

ALTER TABLE jobs ADD COLUMN worker TEXT;                               -- the slot that holds or last held it
ALTER TABLE webhooks ADD COLUMN claimed_until REAL;                    -- a process is sending it until then
