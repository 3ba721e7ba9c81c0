"""A shop: orders that can be looked up and cancelled."""

from dataclasses import dataclass, field

from tau2 import Environment


@dataclass
class Action:
    name: str
    arguments: dict
    requestor: str = "assistant"


@dataclass
class EvaluationCriteria:
    actions: list[Action]
    communicate_info: list[str] = field(default_factory=list)
    nl_assertions: list[str] | None = None
    reward_basis: tuple[str, ...] = ("DB", "COMMUNICATE")


@dataclass
class Task:
    id: str
    user_scenario: str
    evaluation_criteria: EvaluationCriteria
    user_tools: list[str] | None = None
    initial_state: None = None


class ShopTools:
    def __init__(self, stock: int) -> None:
        self.db = {"orders": {f"A{n}": {"price": 10 * n, "status": "open"} for n in range(1, 4)}, "stock": stock}

    def cancel(self, order: str) -> dict:
        """Cancel an order."""
        found = self.db["orders"][order]
        if found["status"] != "open":
            raise ValueError(f"{order} is {found['status']}")
        found["status"] = "cancelled"
        return found

    def look_up(self, order: str) -> dict:
        """What is known of an order."""
        return self.db["orders"][order]


def get_environment(stock: int = 5) -> Environment:
    return Environment("shop", "Cancel open orders alone.", ShopTools(stock))


def get_tasks(task_split_name=None) -> list[Task]:
    return [
        Task("cancel", "Cancel order A1.", EvaluationCriteria([Action("cancel", {"order": "A1"})])),
        Task("price", "What did A2 cost?", EvaluationCriteria([Action("look_up", {"order": "A2"})], ["20"])),
        Task("nothing", "Cancel A9, which does not exist.", EvaluationCriteria([])),
        Task("polite", "Hi.", EvaluationCriteria([], [], ["It was polite"], ("DB", "NL_ASSERTION"))),
        Task("restart", "It hangs.", EvaluationCriteria([Action("restart", {}, "user")])),
    ]


class Registry:
    def get_domains(self) -> list[str]:
        return ["shop"]

    def get_task_sets(self) -> list[str]:
        return ["shop", "shop_small"]

    def get_env_constructor(self, name: str):
        return {"shop": get_environment}[name]

    def get_tasks_loader(self, name: str):
        return get_tasks if name == "shop" else lambda: get_tasks()[:2]

    def get_task_splits_loader(self, name: str):
        return (lambda: {"train": ["cancel", "price"], "test": ["nothing", "restart"]}) if name == "shop" else None


registry = Registry()
