-- name: id
SELECT id FROM identity;

-- name: see
-- Between two of these nobody was there to write one, or the database was not.
UPDATE identity SET
    away_from = CASE WHEN seen_at < :now - :gap_seconds THEN seen_at ELSE away_from END,
    away_until = CASE WHEN seen_at < :now - :gap_seconds THEN CAST(:now AS DOUBLE PRECISION) ELSE away_until END,
    seen_at = CAST(:now AS DOUBLE PRECISION);

-- name: outage
SELECT away_from, away_until FROM identity WHERE away_from IS NOT NULL;
