"""When and in what order the stages of dvc.yaml run: Prefect flows, and the services around them.

python -m flows.lifecycle --help      run the line (or part of it) from here
python -m flows.services up           Prefect and MLflow on loopback
python -m flows run                   what `make run` does after the set-up
"""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# None of the tools may phone home. Set before any of them is imported, and inherited by everything started from here.
QUIET = {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DVC_NO_ANALYTICS": "1",
}
for _key, _value in QUIET.items():
    os.environ.setdefault(_key, _value)


def connect() -> None:
    """Points Prefect at this workspace's server when there is one, else at a temporary one; PREFECT_API_URL decides if set.

    Called before prefect is imported. An address in prefect.toml whose server is gone would stop every flow run, so it is
    taken away; an empty PREFECT_API_URL would not do, as Prefect then sends its events nowhere and says so at each of them.
    """
    if os.environ.get("PREFECT_API_URL"):
        return
    from flows.services import Services

    if address := Services().prefect_address():
        os.environ["PREFECT_API_URL"] = f"{address}/api"
        return
    os.environ.pop("PREFECT_API_URL", None)
    # The temporary server migrates a database first, which a busy machine does slowly.
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "240")
