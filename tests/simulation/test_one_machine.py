"""What Ray does not start on one machine, and that a Ray with other names starts as usual."""

from types import SimpleNamespace

import pytest

from flower_dp.simulation import one_machine
from flower_dp.simulation.one_machine import lean


def made(**methods):
    node = type("Node", (), methods)
    return SimpleNamespace(_private=SimpleNamespace(node=SimpleNamespace(Node=node), utils=SimpleNamespace()))


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
        assert not vars(ray._private.utils)


@pytest.mark.parametrize("reason", ["no answer", "no client"])
def test_a_raylet_that_does_not_register_is_rays_to_tell(reason, monkeypatch):
    monkeypatch.setattr(one_machine, "_LONGEST", 0.0)
    ray = made(
        start_ray_processes=lambda node: None,
        **({"get_gcs_client": lambda node: SimpleNamespace(get_all_node_info=dict)} if reason == "no answer" else {}),
    )
    with lean(ray):
        ray._private.node.Node().start_ray_processes()


def test_the_installed_ray_has_what_is_replaced():
    import ray._private.node
    import ray._private.utils

    assert all(hasattr(ray._private.node.Node, name) for name in ("start_api_server", "start_monitor", "start_ray_processes"))
    assert hasattr(ray._private.utils, "get_dashboard_dependency_error")
