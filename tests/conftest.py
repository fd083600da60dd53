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


@pytest.fixture(autouse=True)
def nothing_left_running():
    """Ends what a test that failed half way left of its projects, with everything below it."""
    yield
    from tests.flows.toy import STARTED

    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            import psutil

            for below in psutil.Process(process.pid).children(recursive=True):
                below.kill()
            process.kill()
            process.wait()
