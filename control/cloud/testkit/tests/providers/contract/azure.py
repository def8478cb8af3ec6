"""Runs the flow of the contract test with Microsoft's own client, and verifies bodies by the client's models.

Usage: azure.py flow URL PARAMETERS (JSON: see `Flow.run` for its fields): the flow against the server that is given. Prints JSON:
package of the client, error codes, and fields of responses that the models don't have.

azure.py models FILE: a file of JSON, a list of [name of the model, body]. Prints for each body the fields that the model doesn't
have, and the body as the client writes it, which is without the fields that only the API sets.
"""

import json
import sys
from importlib.metadata import version

# This file has the name of the client's package: its folder must not be searched.
sys.path.pop(0)

from azure.core.exceptions import HttpResponseError
from azure.core.pipeline.policies import SansIOHTTPPolicy
from azure.mgmt.network import NetworkManagementClient, models
from azure.mgmt.network._utils.model_base import Model

PACKAGE = "azure-mgmt-network"


def unknown(value, path=""):
    """Fields that the model of a value doesn't have."""
    if isinstance(value, Model):
        attributes = {field._rest_name: name for name, field in value._attr_to_rest_field.items()}
        for key in value.keys():
            if key in attributes:
                yield from unknown(getattr(value, attributes[key]), f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from unknown(item, f"{path}[{index}]")


class Flow:
    def __init__(self, url, parameters):
        self.api = NetworkManagementClient(
            credential=object(),
            subscription_id=parameters["subscription"],
            base_url=url,
            authentication_policy=SansIOHTTPPolicy(),
            retry_total=0,
            polling_interval=0,
        )
        self.given, self.group = parameters, parameters["group"]
        self.unknown, self.codes = [], {}

    def seen(self, value):
        self.unknown += unknown(value, type(value).__name__)
        return value

    def address(self, name):
        return self.seen(self.api.public_ip_addresses.get(self.group, name))

    def nic(self, name):
        return self.seen(self.api.network_interfaces.get(self.group, name))

    def put_address(self, name, body, condition):
        put = self.api.public_ip_addresses.begin_create_or_update
        return self.seen(put(self.group, name, body, headers=condition).result())

    def put_nic(self, name, nic):
        put = self.api.network_interfaces.begin_create_or_update
        return self.seen(put(self.group, name, nic, headers={"If-Match": nic.etag}).result())

    def refused(self, step, call, *arguments):
        try:
            call(*arguments)
        except HttpResponseError as error:
            self.codes[step] = [error.status_code, error.error.code]
        else:
            raise AssertionError(f"{step} was not refused")

    def list(self):
        wanted = self.given["tags"].items()
        addresses = [self.seen(it) for it in self.api.public_ip_addresses.list(self.group)]
        return [it.name for it in addresses if wanted <= (it.tags or {}).items()]

    def set_claim(self, name, claim):
        address = self.address(name)
        tags = {key: value for key, value in address.tags.items() if key not in self.given["claim"]}
        address.tags = {**tags, **claim}
        self.put_address(name, address, {"If-Match": address.etag})

    def prepare(self, name):
        nic = self.nic(name)
        subnet = next(it for it in nic.ip_configurations if it.primary).subnet
        nic.enable_ip_forwarding = True
        nic.ip_configurations.append(
            models.NetworkInterfaceIPConfiguration(
                name=self.given["configuration"],
                properties=models.NetworkInterfaceIPConfigurationPropertiesFormat(
                    primary=False,
                    private_ip_address_version="IPv4",
                    private_ip_allocation_method="Dynamic",
                    subnet=models.Subnet(id=subnet.id),
                ),
            )
        )
        self.put_nic(name, nic)

    def own(self, nic):
        return next(it for it in nic.ip_configurations if it.name == self.given["configuration"])

    def attach(self, name, address):
        nic = self.nic(name)
        self.own(nic).public_ip_address = models.PublicIPAddress(id=self.address(address).id)
        self.put_nic(name, nic)

    def detach(self, name):
        nic = self.nic(name)
        del self.own(nic).properties["publicIPAddress"]
        self.put_nic(name, nic)

    def unprepare(self, name):
        nic = self.nic(name)
        nic.ip_configurations = [it for it in nic.ip_configurations if it.name != self.given["configuration"]]
        self.put_nic(name, nic)

    def allocate(self, name, tags):
        self.refused("missing", self.address, name)
        body = models.PublicIPAddress(
            location=self.given["location"],
            sku=models.PublicIPAddressSku(name="Standard"),
            tags=tags,
            properties=models.PublicIPAddressPropertiesFormat(
                public_ip_allocation_method="Static", public_ip_address_version="IPv4"
            ),
        )
        self.put_address(name, body, {"If-None-Match": "*"})
        self.refused("exists", self.put_address, name, body, {"If-None-Match": "*"})

    def release(self, name):
        address = self.address(name)
        delete = self.api.public_ip_addresses.begin_delete
        delete(self.group, name, headers={"If-Match": address.etag}).result()

    def run(self):
        given = self.given
        name, (first, second) = given["address"], given["nics"]
        assert self.list() == given["names"], "the pages of the list"
        self.set_claim(name, given["claim"])
        for nic in (first, second):
            self.prepare(nic)
        self.attach(first, name)
        taken = self.address(name)
        assert taken.ip_configuration.id.endswith(f"/{first}/ipConfigurations/{given['configuration']}"), taken
        self.refused("stolen", self.attach, second, name)
        self.refused("released", self.release, name)
        stale = self.nic(first)
        self.detach(first)
        self.refused("stale", self.put_nic, first, stale)
        self.attach(second, name)
        self.detach(second)
        assert self.address(name).ip_configuration is None
        for nic in (first, second):
            self.unprepare(nic)
        self.set_claim(name, {})
        self.allocate(given["allocated"], given["allocatedTags"])
        self.set_claim(given["allocated"], {})
        self.release(given["allocated"])


def verify(name, body):
    model = getattr(models, name)(body)
    return {"unknown": list(unknown(model, name)), "written": model.as_dict(exclude_readonly=True)}


def main():
    if sys.argv[1] == "models":
        with open(sys.argv[2], encoding="utf-8") as file:
            result = [verify(name, body) for name, body in json.load(file)]
    else:
        flow = Flow(sys.argv[2], json.loads(sys.argv[3]))
        flow.run()
        result = {
            "package": f"{PACKAGE}=={version(PACKAGE)}",
            "codes": flow.codes,
            "unknown": sorted(set(flow.unknown)),
        }
    json.dump(result, sys.stdout)


main()
