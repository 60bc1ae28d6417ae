-- The newest completed jobs of a model are looked at for every submission.

CREATE INDEX jobs_by_completion ON jobs (model, id DESC) WHERE status = 'completed';
