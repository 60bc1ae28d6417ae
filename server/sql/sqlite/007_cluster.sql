-- Which database this is, since when it answers, and which workers a job waits for.

ALTER TABLE jobs ADD COLUMN gpus INTEGER;                              -- of a worker that may take it; NULL: any
ALTER TABLE jobs ADD COLUMN finished_stage TEXT;                       -- the last one whose duration was recorded
ALTER TABLE workers ADD COLUMN files TEXT;                             -- 'data_dir', or the URL of its store

-- seen_at: when somebody last wrote that it answers; the last time that it did not, as far as that shows.
CREATE TABLE identity (
    one        INTEGER PRIMARY KEY DEFAULT 1 CHECK (one = 1),
    id         TEXT NOT NULL,
    seen_at    REAL,
    away_from  REAL,
    away_until REAL
) STRICT;

INSERT INTO identity (id) VALUES (lower(hex(randomblob(16))));
