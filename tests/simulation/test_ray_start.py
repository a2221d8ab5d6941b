"""Ray that does not start: it is tried once more, and then the error says why."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace

import pytest

from flower_dp.running.launch_record import LaunchRecord
from flower_dp.simulation import attempt, workers


class Ray:
    """Ray, of which so many starts fail."""

    def __init__(self, failures):
        self.failures, self.starts, self.ended = failures, 0, 0
        self._private = SimpleNamespace(ray_constants=SimpleNamespace(ENABLE_RAY_CLUSTER=True))

    def init(self, *, _temp_dir, **_):
        self.starts += 1
        if self.starts <= self.failures:
            raise Exception("Ray says:\n  the current node timed out during startup")

    def shutdown(self):
        self.ended += 1


@pytest.mark.parametrize("failures", [0, 1])
def test_a_start_that_fails_is_tried_once_more(failures, tmp_path, caplog):
    ray = Ray(failures)
    workers._init(ray, 2, tmp_path)
    assert (ray.starts, ray.ended) == (1 + failures, failures)
    assert ("tried once more: the current node timed out during startup" in caplog.text) == bool(failures)


def test_a_second_failure_names_the_cause_and_the_last_line_of_rays_log(tmp_path):
    logs = tmp_path / "session_1" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("started\nno space left on device\n\n")
    (logs / "gcs_server.err").write_text("")
    ray = Ray(9)
    with pytest.raises(workers.RayStartError, match=r"tried twice: the current node timed out.*load .* on \d+ cores") as error:
        workers._init(ray, 2, tmp_path)
    assert str(error.value).endswith("the last line of its log: no space left on device")
    assert ray.starts == 2


@pytest.mark.parametrize("busy", [True, False])
def test_a_run_that_is_refused_while_its_workers_are_made_does_not_end_ray_under_them(busy, tmp_path, monkeypatch):
    """Ray ends a process in which a thread uses it after its end, before the process has said why the run was refused."""
    begins, goes_on, futures, ended = threading.Event(), threading.Event(), [], []

    class Threads(ThreadPoolExecutor):
        def submit(self, *task):
            futures.append(super().submit(*task))
            return futures[-1]

    def start(*_):
        begins.set()
        assert goes_on.wait(60)
        raise workers.RayStartError("there is none")

    def check():
        assert begins.wait(60)
        if not busy:
            goes_on.set()
            wait(futures)
        raise ValueError("rounds=-1: must be >= 0")

    monkeypatch.setattr(attempt, "ThreadPoolExecutor", Threads)
    monkeypatch.setattr(workers, "start_ray", start)
    monkeypatch.setattr(workers, "stop_ray", lambda: ended.append(True))
    begun = LaunchRecord(app="", name="mine", overrides={}, workers=1, supernodes=None, gpus_per_worker=0.0)
    outcome = attempt.on_ray(begun, tmp_path, resume="", check=check, started=lambda: None, on_line=print)
    goes_on.set()
    assert (outcome.status, outcome.details) == ("refused", "rounds=-1: must be >= 0")
    assert ended == ([] if busy else [True])
