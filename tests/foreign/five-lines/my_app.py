from my_model import evaluate, load_records, make_model

import flower_dp

app = flower_dp.app(model_fn=make_model, data_fn=load_records, evaluate_fn=evaluate)
