"""A device, with its own records, budget and ledger, which its node-config names."""

from flwr.app import Context

from flower_dp.clients import FedSGDDPCRecipe, LocalDPClient, TensorRecords, client_app
from three_devices.task import make_model, read


def client_fn(context: Context) -> LocalDPClient:
    """Return the device's client.

    Nothing that protects the device comes from `context.run_config`, which the server writes.
    """
    own = context.node_config
    inputs, targets = read(str(own["data-path"]))
    recipe = FedSGDDPCRecipe(
        mechanism="laplace",
        clip_norm=float(own["clip-norm"]),
        epsilon=float(own["epsilon"]),
        num_replies=int(own["num-replies"]),
    )
    return LocalDPClient(
        model=make_model(),
        clients={str(own["name"]): TensorRecords(inputs=inputs, targets=targets)},
        recipe=recipe,
        ledger=str(own["ledger-path"]),  # required here: without it the app has no account, and the device sends nothing
    )


app = client_app(client_fn)
