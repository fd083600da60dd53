"""Fixtures for the tests of the frame."""

import pytest


@pytest.fixture(scope="session")
def services(tmp_path_factory):
    """Prefect, MLflow and a worker in a directory of their own: addresses as environment variables for a project."""
    from flows.services import Services

    with pytest.MonkeyPatch.context() as patch:
        for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
            patch.delenv(name, raising=False)
        own = Services(tmp_path_factory.mktemp("services"))
        state = own.up()
    yield {
        "PREFECT_API_URL": state["prefect"] + "/api",
        "MLFLOW_TRACKING_URI": state["mlflow"],
        "PREFECT_HOME": str(own.home / "prefect"),
    }
    own.down()
