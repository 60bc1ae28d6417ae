"""``reelwright``, with worker processes that do what the words of a prompt say (see scripted_worker.py).

python -m tests.server.cluster.scripted_work worker --database-url ...
"""

from unittest.mock import patch

from server.cli import main
from tests.server.scripted_worker import run_script

# Here, so that a supervisor that is a child of ``serve`` has it too: it imports this module anew.
patch("server.worker_handle.run_worker", run_script).start()

if __name__ == "__main__":
    main()
