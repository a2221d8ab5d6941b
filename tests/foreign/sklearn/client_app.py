import warnings

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

app = ClientApp()


@app.train()
def fit(message, context):
    inputs, labels = load_iris(return_X_y=True)
    part, parts = context.node_config["partition-id"], context.node_config["num-partitions"]
    model = LogisticRegression(max_iter=5, warm_start=True)
    model.classes_ = np.unique(labels)
    model.coef_, model.intercept_ = message.content["arrays"].to_numpy_ndarrays()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(inputs[part::parts], labels[part::parts])
    record = ArrayRecord([model.coef_, model.intercept_])
    metrics = MetricRecord({"num-examples": len(labels[part::parts])})
    return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "acc": 0.5})}), reply_to=message)
