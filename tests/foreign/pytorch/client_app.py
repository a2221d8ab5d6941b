from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from task import accuracy, load_data, make_model, train

app = ClientApp()


@app.train()
def fit(message, context):
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, labels = load_data(context.node_config["partition-id"])
    loss = train(model, inputs, labels)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(labels)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, labels = load_data(context.node_config["partition-id"])
    metrics = MetricRecord({"eval_acc": accuracy(model, inputs, labels), "num-examples": len(labels)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
