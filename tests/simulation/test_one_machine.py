"""What Ray does not start on one machine, and that a Ray with other names starts as usual."""

from types import SimpleNamespace

import pytest

from flower_dp.simulation.workers import lean


def made(**methods):
    node = type("Node", (), methods)
    return SimpleNamespace(_private=SimpleNamespace(node=SimpleNamespace(Node=node), services=SimpleNamespace()))


def test_the_dashboard_and_the_autoscaler_are_not_started_within_it_and_are_afterwards():
    started = []
    ray = made(
        start_api_server=lambda node, include_dashboard: started.append("dashboard"),
        start_monitor=lambda node: started.append("autoscaler"),
    )
    before = dict(vars(ray._private.node.Node))

    def start():
        with lean(ray):
            node = ray._private.node.Node()
            node.start_monitor()
            node.start_api_server(include_dashboard=False)
            assert (started, node._webui_url) == ([], "")
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
        assert not {"start_api_server", "start_monitor"} & set(vars(ray._private.node.Node))


def test_the_installed_ray_has_what_is_replaced():
    import ray._private.node

    assert all(hasattr(ray._private.node.Node, name) for name in ("start_api_server", "start_monitor"))
