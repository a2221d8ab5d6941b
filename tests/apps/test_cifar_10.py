"""The task cifar-10 and the model resnet18: made-up pictures in the data set's own files, and rounds of training on them."""

import hashlib
import pickle

import numpy as np
import pytest
import torch

from flower_dp.apps.tasks import cifar_10, load_task, models, vision
from flower_dp.apps.tasks.cifar_10 import Own, load

PER_BATCH, TEST = 8, 10


@pytest.fixture
def small_cifar(tmp_path, monkeypatch):
    """A folder with few pictures in files as those of CIFAR-10, whose sums torchvision takes for the right ones; pictures, labels."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()

    def write(name, content):
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        return hashlib.md5(data, usedforsecurity=False).hexdigest()

    def batch(name, size):
        pictures, labels = rng.integers(0, 256, (size, 3 * 32 * 32), dtype=np.uint8), rng.integers(0, 10, size).tolist()
        made.append((pictures, labels))
        return [name, write(name, {"data": pictures, "labels": labels})]

    made = []
    theirs = vision.import_torchvision().datasets.CIFAR10
    monkeypatch.setattr(theirs, "train_list", [batch(f"data_batch_{number}", PER_BATCH) for number in range(1, 6)])
    monkeypatch.setattr(theirs, "test_list", [batch("test_batch", TEST)])
    names = {"label_names": [str(number) for number in range(10)]}
    monkeypatch.setattr(theirs, "meta", {**theirs.meta, "md5": write("batches.meta", names)})
    load_task.cache_clear()
    yield tmp_path, made
    load_task.cache_clear()


def test_pictures_and_labels_are_those_of_the_files(small_cifar):
    folder, made = small_cifar
    task = load(str(folder), Own())
    assert (task.train_inputs.shape, task.test_inputs.shape) == ((5 * PER_BATCH, 3, 32, 32), (TEST, 3, 32, 32))
    assert np.array_equal(task.train_inputs.reshape(-1, 3072), np.concatenate([pictures for pictures, _ in made[:5]]))
    assert task.train_labels.tolist() == [label for _, labels in made[:5] for label in labels]
    assert np.array_equal(task.test_inputs.reshape(-1, 3072), made[5][0])
    assert task.test_labels.tolist() == made[5][1]
    assert task.source == f"CIFAR-10's cifar-10-batches-py in {folder}"


def test_each_color_is_standardized_by_its_own_constants():
    pictures = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    pictures[0, 1], pictures[1, 2] = 255, 51
    numbers = cifar_10.standardized(pictures)
    assert numbers.dtype == torch.float32
    # By hand: (pixel / 255 - mean) / deviation.
    assert numbers[0, 1, 3, 4].item() == pytest.approx((1 - 0.4822) / 0.2435, rel=1e-5)
    assert numbers[1, 2, 31, 0].item() == pytest.approx((0.2 - 0.4465) / 0.2616, rel=1e-5)
    assert numbers[1, 0, 0, 0].item() == pytest.approx(-0.4914 / 0.2470, rel=1e-5)
    assert torch.equal(cifar_10.standardized(pictures[None])[0], numbers)


def test_files_that_are_not_the_published_ones_are_not_unpickled(small_cifar):
    folder, _ = small_cifar
    ran = folder / "ran"

    class Payload:
        def __reduce__(self):
            return open, (str(ran), "w")

    (folder / "cifar-10-batches-py" / "data_batch_3").write_bytes(pickle.dumps(Payload()))
    why = r"found no complete cifar-10-batches-py in .*not found or corrupted.*https://www\.cs\.toronto"
    with pytest.raises(ValueError, match=why):
        load(str(folder), Own())
    assert not ran.exists()


def test_resnet18_has_group_normalization():
    model = models.make("resnet18", seed=0, num_features=3072)
    # By hand: 11,689,512 of torchvision's with 1,000 classes, less 990 rows of 512 weights and a bias.
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_689_512 - 990 * 513
    kinds = [type(layer) for layer in model.modules()]
    assert torch.nn.BatchNorm2d not in kinds
    assert kinds.count(torch.nn.GroupNorm) == 20
    # Its output of a record depends on no other record.
    inputs = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(inputs)[:1], model(inputs[:1]))
    with pytest.raises(ValueError, match="model='resnet18': needs 3 x 32 x 32 pixels, not 784 features"):
        models.make("resnet18", seed=0)
    with pytest.raises(ValueError, match="model-bias=False: must be True for model='resnet18'"):
        models.make("resnet18", seed=0, num_features=3072, bias=False)
