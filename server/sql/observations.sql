-- name: add
INSERT INTO samples (metric, labels, value) VALUES (:metric, :labels, :value)
ON CONFLICT (metric, labels) DO UPDATE SET value = samples.value + excluded.value;

-- name: set
INSERT INTO samples (metric, labels, value) VALUES (:metric, :labels, :value)
ON CONFLICT (metric, labels) DO UPDATE SET value = excluded.value;

-- name: add_to_bucket
INSERT INTO buckets (metric, labels, upper_bound, count) VALUES (:metric, :labels, :upper_bound, 1)
ON CONFLICT (metric, labels, upper_bound) DO UPDATE SET count = buckets.count + 1;

-- name: samples
SELECT labels, value FROM samples WHERE metric = :metric ORDER BY labels;

-- name: buckets
SELECT labels, upper_bound, count FROM buckets WHERE metric = :metric ORDER BY labels, upper_bound;
