"""Apps of somebody's own, on disk."""


def write_app(folder, config="", *, tool="", **modules):
    """Write an app, whose ServerApp and ClientApp are `server` and `client` of my_app, and its modules; return the folder."""
    folder.mkdir(exist_ok=True)
    project = '[project]\nname = "mine"\nversion = "1.0.0"\n[tool.flwr.app]\npublisher = "me"\n'
    components = '[tool.flwr.app.components]\nserverapp = "my_app:server"\nclientapp = "my_app:client"\n'
    (folder / "pyproject.toml").write_text(f"{project}{components}[tool.flwr.app.config]\n{config}\n{tool}")
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return folder
