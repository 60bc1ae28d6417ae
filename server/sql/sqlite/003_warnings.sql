-- What the client should know from the submission on, a JSON list; those of the run are in its result.

ALTER TABLE jobs ADD COLUMN warnings TEXT NOT NULL DEFAULT '[]';
