import json

from flwr.serverapp.strategy import Result


class Logged:
    """What advanced apps put into a subclass of their own: a loop, a best model, a file of results."""

    def start(self, grid, initial_arrays, num_rounds=3, timeout=3600, train_config=None, evaluate_config=None, evaluate_fn=None):
        result, history = Result(), []
        arrays = initial_arrays
        for server_round in range(1, num_rounds + 1):
            messages = self.configure_train(server_round, arrays, train_config or self.train_config, grid)
            replies = grid.send_and_receive(messages, timeout=timeout)
            aggregated, metrics = self.aggregate_train(server_round, replies)
            if aggregated is not None:
                arrays = result.arrays = aggregated
            history.append({"round": server_round, "metrics": dict(metrics or {})})
            with open("results.json", "w") as file:
                json.dump(history, file)
        return result
