"""The smallest FastAPI server there is, to compare with: one route that answers with a fixed document.

python -m benchmarks.bare_app PORT DOCUMENT.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI


def main() -> None:
    """Serve until killed."""
    port, path = int(sys.argv[1]), Path(sys.argv[2])
    document = json.loads(path.read_text(encoding="utf-8"))
    app = FastAPI()

    @app.get("/bare")
    async def get_bare() -> dict[str, Any]:
        return dict(document)

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False)


if __name__ == "__main__":
    main()
