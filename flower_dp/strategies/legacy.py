"""Flower's old server API, `ServerApp(server_fn=...)`, and how to change an app that uses it."""

_CHANGE = """\
{name} runs on Flower's Message API; ServerApp(server_fn=...), ServerApp(strategy=...) and start_server are the older API. \
No client was asked. In place of ServerAppComponents(strategy=..., config=ServerConfig(num_rounds=...)), write:

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        {name}(...).start(grid, ArrayRecord(make_model().state_dict()), num_rounds=...)

Grid and ServerApp come from flwr.serverapp, ArrayRecord and Context from flwr.app. \
Clients stay as they are, see docs/your-own-app.md"""


class LegacyAppError(TypeError):
    """The error of a strategy of this package under Flower's old server API.

    Args:
        strategy: name of the strategy's class.
    """

    def __init__(self, strategy: str) -> None:
        super().__init__(_CHANGE.format(name=strategy))
