"""Flower's old server API, `ServerApp(server_fn=...)`, and how to change an app that uses it."""

_CHANGE = """\
{name} runs on Flower's Message API; ServerApp(server_fn=...), ServerApp(strategy=...) and start_server are the API before it. \
No client was asked. Where the app now makes ServerAppComponents(strategy=..., config=ServerConfig(num_rounds=...)), write:

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        {name}(...).start(grid, ArrayRecord(make_model().state_dict()), num_rounds=...)

Grid and ServerApp come from flwr.serverapp, ArrayRecord and Context from flwr.app. Clients stay as they are, see docs/your-own-app.md"""


class LegacyAppError(TypeError):
    """A strategy of this package was given to Flower's old server API.

    Args:
        strategy: its class's name.
    """

    def __init__(self, strategy: str) -> None:
        super().__init__(_CHANGE.format(name=strategy))
