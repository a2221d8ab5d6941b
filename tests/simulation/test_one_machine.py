"""What Ray does not start on one machine, and that a Ray with other names starts as usual."""

import shutil
from types import SimpleNamespace

import pytest

from flower_dp.simulation import one_machine
from flower_dp.simulation.one_machine import lean


def made(**methods):
    node = type("Node", (), methods)
    return SimpleNamespace(_private=SimpleNamespace(node=SimpleNamespace(Node=node), services=SimpleNamespace()))


class Asked:
    """A Ray's GCS that knows a node from the third question on."""

    def __init__(self):
        self.questions = 0

    def get_all_node_info(self):
        self.questions += 1
        return {"node": "there"} if self.questions > 2 else {}


def test_the_dashboard_and_the_autoscaler_are_not_started_within_it_and_are_afterwards():
    started, asked = [], Asked()
    ray = made(
        start_api_server=lambda node, include_dashboard: started.append("dashboard"),
        start_monitor=lambda node: started.append("autoscaler"),
        start_ray_processes=lambda node: started.append("raylet"),
        get_gcs_client=lambda node: asked,
    )
    before = dict(vars(ray._private.node.Node))

    def start():
        with lean(ray):
            node = ray._private.node.Node()
            node.start_monitor()
            node.start_api_server(include_dashboard=False)
            node.start_ray_processes()
            assert (started, asked.questions, node._webui_url) == (["raylet"], 3, "")
            raise OSError("no port")

    with pytest.raises(OSError, match="no port"):
        start()
    assert dict(vars(ray._private.node.Node)) == before


def test_a_ray_without_these_modules_starts_as_usual():
    with lean(SimpleNamespace(_private=SimpleNamespace())):
        pass


def test_what_a_ray_does_not_have_is_not_replaced():
    ray = made()
    with lean(ray):
        assert not {"start_api_server", "start_monitor", "start_ray_processes"} & set(vars(ray._private.node.Node))
        assert not vars(ray._private.services)


@pytest.mark.parametrize("reason", ["no answer", "no client"])
def test_a_raylet_that_does_not_register_is_rays_to_tell(reason, monkeypatch):
    monkeypatch.setattr(one_machine, "_LONGEST", 0.0)
    ray = made(
        start_ray_processes=lambda node: None,
        **({"get_gcs_client": lambda node: SimpleNamespace(get_all_node_info=dict)} if reason == "no answer" else {}),
    )
    with lean(ray):
        ray._private.node.Node().start_ray_processes()


RAYLET = ["raylet", "--session_dir=SESSION", "--node_id=4a", "--head", "--dashboard_agent_command=python agent.py --minimal"]


def command_of_a_raylet(ray, tmp_path, command=RAYLET):
    """The command by which a raylet is started within `lean`."""
    started = []
    ray._private.services.start_ray_process = lambda command, kind, fate_share: started.append((command, kind, fate_share))
    before = dict(vars(ray._private.services))
    with lean(ray):
        own = [word.replace("SESSION", str(tmp_path)) for word in command]
        ray._private.services.start_ray_process(own, "raylet", fate_share=True)
    assert vars(ray._private.services) == before
    ((command, *others),) = started
    assert others == ["raylet", True]
    return [word.replace(str(tmp_path), "SESSION") for word in command]


def test_a_raylet_has_an_agent_that_does_nothing_and_has_no_ports(tmp_path):
    ray = made()
    ray._raylet = pytest.importorskip("ray._raylet")
    assert command_of_a_raylet(ray, tmp_path) == [*RAYLET[:-1], f"--dashboard_agent_command={shutil.which('cat')}"]
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["-1", "-1", "-1"]
    ports = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
    assert {path.name for path in tmp_path.iterdir()} == {ray._raylet.get_port_filename("4a", port) for port in ports}


def test_other_processes_of_ray_start_as_usual(tmp_path):
    ray = made()
    ray._raylet = pytest.importorskip("ray._raylet")
    assert command_of_a_raylet(ray, tmp_path, RAYLET[:-1]) == RAYLET[:-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("lacks", ["ports", "the session", "cat"])
def test_where_the_agent_can_not_be_left_out_it_starts_as_usual(lacks, tmp_path, monkeypatch):
    ray = made()
    ray._raylet = SimpleNamespace() if lacks == "ports" else pytest.importorskip("ray._raylet")
    if lacks == "cat":
        monkeypatch.setattr(one_machine.shutil, "which", lambda name: None)
    command = [word for word in RAYLET if lacks != "the session" or not word.startswith("--session_dir")]
    assert command_of_a_raylet(ray, tmp_path, command) == command


def test_the_installed_ray_has_what_is_replaced():
    import ray._private.node
    import ray._private.services

    assert all(hasattr(ray._private.node.Node, name) for name in ("start_api_server", "start_monitor", "start_ray_processes"))
    assert hasattr(ray._private.services, "start_ray_process")
