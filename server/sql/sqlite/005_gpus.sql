-- A worker may have several GPUs: how many, and the memory in use on each, as a JSON object of devices.

ALTER TABLE workers ADD COLUMN gpus INTEGER NOT NULL DEFAULT 1;
ALTER TABLE workers ADD COLUMN memory_in_use TEXT;
ALTER TABLE workers DROP COLUMN memory_in_use_bytes;
