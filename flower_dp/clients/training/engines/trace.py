"""Tracing: the operations of a function on tensors as a graph, to be executed again on other tensors of the same shapes.

`torch.fx.experimental.proxy_tensor.make_fx` does this too, but first imports torch's compiler, which takes more than a second
in every process.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

# Key of a node's meta: shape, strides and type of its tensor, and whether its numbers are to be negated where they are read.
LAYOUT = "layout"
# Tags of operations whose result, or its shape, depends on the data.
_OF_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def traced(function: Callable[..., Any], *inputs: Tensor, refused: Sequence[Tensor] = ()) -> fx.GraphModule:
    """Execute a function on tensors, and return its operations as a graph, below vmap, autograd and other transformations.

    Other tensors that the function uses are constants of the graph.

    Args:
        function: function of these tensors that returns a tensor, or tuples and lists of tensors.
        inputs: tensors of the shapes, strides and types of the graph's inputs.
        refused: weights that must not be constants of the graph.

    Raises:
        RuntimeError: if the function draws random numbers, its control flow or its shapes depend on data, it changes a tensor of
            another's making, or it uses a refused weight.
        Exception: any error that the function raises.
    """
    recorder = _Recorder(inputs, refused)
    with recorder:
        outputs = function(*inputs)
    recorder.graph.output(tree_map(recorder.node_of, outputs))
    return fx.GraphModule(recorder.constants, recorder.graph)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A recorder that adds each executed operation to a graph.

    Attributes:
        graph: graph of the operations so far.
        constants: module of the tensors that are not inputs of the function.
    """

    def __init__(self, inputs: Sequence[Tensor], refused: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.constants = fx.Graph(), nn.Module()
        self._nodes, self._refused = WeakTensorKeyDictionary(), WeakTensorKeyDictionary(dict.fromkeys(refused, True))
        self._own = WeakTensorKeyDictionary()  # tensors that the function has made
        for index, tensor in enumerate(inputs):
            self._add(tensor, self.graph.placeholder(f"input_{index}"))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch not to import its compiler for this class."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Execute an operation, and add it."""
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError(f"the model draws random numbers ({func})")
        if any(tag in func.tags for tag in _OF_DATA) and not _takes_numbers(func, args):
            raise RuntimeError(f"control flow or shapes depend on data ({func})")
        if any(tensor not in self._own for tensor in _tensors(_written(func, args, kwargs))):
            raise RuntimeError(f"the model changes a tensor that outlives a step, such as a buffer ({func})")
        node = self.graph.call_function(func, *tree_map(self.node_of, (args, kwargs)))
        result = func(*args, **kwargs)
        # The schema of _unsafe_view does not say that it shares memory.
        shares = func is torch.ops.aten._unsafe_view.default or any(part.alias_info is not None for part in func._schema.returns)
        owned = not shares or all(tensor in self._own for tensor in _tensors((args, kwargs)))
        if isinstance(result, Tensor):
            self._add(result, node, owned=owned)
        elif isinstance(result, tuple | list):
            for index, part in enumerate(result):
                if isinstance(part, Tensor):
                    self._add(part, self.graph.call_function(operator.getitem, (node, index)), owned=owned)
        return result

    def node_of(self, value: Any) -> Any:
        """Return the node of a tensor; any other value as it is."""
        if not isinstance(value, Tensor):
            return value
        if value in self._refused:
            raise RuntimeError("the loss uses the model's weights, which torch.func does not differentiate there")
        if value not in self._nodes:
            name = f"constant_{len(list(self.constants.buffers()))}"
            self.constants.register_buffer(name, value.detach())
            self._add(value, self.graph.get_attr(name))
        return self._nodes[value]

    def _add(self, tensor: Tensor, node: fx.Node, *, owned: bool = False) -> None:
        self._nodes[tensor] = node
        if owned:
            self._own[tensor] = True
        # A conjugate is a view as well.
        node.meta[LAYOUT] = tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes to."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    written = (item.name for item in func._schema.arguments if item.alias_info is not None and item.alias_info.is_write)
    return [given[name] for name in written if name in given]


def _takes_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operation looks up by numbers, which give a known shape, not by a mask."""
    masks = (torch.bool, torch.uint8)
    return func is torch.ops.aten.index.Tensor and not any(tensor.dtype in masks for tensor in _tensors(args[1]))


def _tensors(value: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    tree_map(lambda leaf: tensors.append(leaf) if isinstance(leaf, Tensor) else None, value)
    return tensors
