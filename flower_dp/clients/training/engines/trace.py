"""A function on tensors as the list of operations that it executes, which can be executed again on other tensors of these shapes.

`torch.fx.experimental.proxy_tensor.make_fx` does this too, but imports torch's compiler first, which takes more than a second
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
# Operations whose result, or its shape, is not known before they have been executed on the data.
_OF_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def traced(function: Callable[..., Any], *inputs: Tensor, refused: Sequence[Tensor] = ()) -> fx.GraphModule:
    """Execute a function on tensors, and return its operations as a graph, below vmap, autograd and other transformations.

    Other tensors that the function uses are constants of the graph.

    Args:
        function: takes these tensors, and returns a tensor, or tuples and lists of tensors.
        inputs: of the shapes, strides and types that the graph will be given.
        refused: weights that must not be constants of the graph.

    Raises:
        RuntimeError: it draws random numbers, its control flow or its shapes depend on data, it changes a tensor that it has not
            made, or it uses one that is refused.
        Exception: what the function raises.
    """
    recorder = _Recorder(inputs, refused)
    with recorder:
        outputs = function(*inputs)
    recorder.graph.output(tree_map(recorder.node_of, outputs))
    return fx.GraphModule(recorder.constants, recorder.graph)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds each operation that is executed to a graph.

    Attributes:
        graph: the operations so far.
        constants: the module that holds the tensors that come from elsewhere.
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
        if any(one not in self._own for one in _tensors(_written(func, args, kwargs))):
            raise RuntimeError(f"the model changes a tensor that outlives a step, such as a buffer ({func})")
        node = self.graph.call_function(func, *tree_map(self.node_of, (args, kwargs)))
        found = func(*args, **kwargs)
        # The schema of _unsafe_view does not say that it shares memory.
        shares = func is torch.ops.aten._unsafe_view.default or any(one.alias_info is not None for one in func._schema.returns)
        owned = not shares or all(one in self._own for one in _tensors((args, kwargs)))
        if isinstance(found, Tensor):
            self._add(found, node, owned=owned)
        elif isinstance(found, tuple | list):
            for index, one in enumerate(found):
                if isinstance(one, Tensor):
                    self._add(one, self.graph.call_function(operator.getitem, (node, index)), owned=owned)
        return found

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
    written = (one for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write)
    return [given[one.name] for one in written if one.name in given]


def _takes_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operation looks up by numbers, which give a known shape, not by a mask."""
    masks = (torch.bool, torch.uint8)
    return func is torch.ops.aten.index.Tensor and not any(one.dtype in masks for one in _tensors(args[1]))


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map(lambda one: found.append(one) if isinstance(one, Tensor) else None, value)
    return found
