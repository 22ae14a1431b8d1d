"""`Uncopied`: the rule for objects that must not be copied, because they own or name live pages."""

from typing import NoReturn

from kvcache.errors import InvalidRequestError


class Uncopied:
    """Refuses `copy`, `deepcopy` and `pickle`, and so also a process that is started by `spawn`.

    A copy would have tables of its own over the same pages, or none: its page ids would be wrong, and a kernel that
    reads them would read the pages of other requests.

    >>> import copy
    >>> class Owner(Uncopied):
    ...     pass
    >>> copy.copy(Owner())
    Traceback (most recent call last):
    kvcache.errors.InvalidRequestError: a Owner cannot be copied, pickled or sent to another process: ...
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise InvalidRequestError(
            f"a {type(self).__name__} cannot be copied, pickled or sent to another process: it owns or names live "
            "pages; make it in the process that uses it"
        )
