#!/usr/bin/env python3
"""AWS's own client as verifier of the fake and of our requests, and moto as a second EC2.

    aws.py flow URL STATE    the life of a VIP by boto3 against a fake at URL; STATE has its ids, as JSON. Prints what the replies said.
    aws.py moto              starts moto's EC2 with two instances and an address, prints its URL and ids, and ends with standard input
"""

import json
import logging
import sys

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError


def client(url, key="AKIDFIXED"):
    config = Config(retries={"total_max_attempts": 1})
    return boto3.client("ec2", region_name="eu-west-1", endpoint_url=url, config=config,
                        aws_access_key_id=key, aws_secret_access_key="secret")


def code_of(call, **parameters):
    """The error code of a call that has to fail."""
    try:
        call(**parameters)
    except ClientError as error:
        return error.response["Error"]["Code"]
    return None


def filters(**values):
    return [{"Name": name.replace("__", ":").replace("_", "-"), "Values": value} for name, value in values.items()]


def flow(url, state):
    ec2 = client(url)
    allocation, (a, b), private = state["allocation"], state["enis"], state["private"]
    found = ec2.describe_addresses(Filters=filters(tag__vipgate=["public"]))["Addresses"]
    interfaces = ec2.describe_network_interfaces(
        Filters=[{"Name": "attachment.instance-id", "Values": state["instances"]}])["NetworkInterfaces"]
    ec2.describe_instances(Filters=filters(instance_id=state["instances"]))
    types = ec2.describe_instance_types(InstanceTypes=["c7gn.xlarge"])["InstanceTypes"]
    by_id = filters(allocation_id=[allocation])
    ec2.describe_addresses(Filters=by_id)
    ec2.create_tags(Resources=[allocation], Tags=[{"Key": "vipgate.io/cluster", "Value": "prod"},
                                                  {"Key": "vipgate.io/vip", "Value": "Service default/web"}])
    for eni, address in zip((a, b), private):
        interface = ec2.describe_network_interfaces(NetworkInterfaceIds=[eni])["NetworkInterfaces"][0]
        ec2.modify_network_interface_attribute(NetworkInterfaceId=eni, SourceDestCheck={"Value": False})
        ec2.describe_subnets(SubnetIds=[interface["SubnetId"]])
        ec2.create_tags(Resources=[allocation], Tags=[{"Key": f"vipgate.io/private/{eni}", "Value": address}])
        ec2.assign_private_ip_addresses(NetworkInterfaceId=eni, PrivateIpAddresses=[address], AllowReassignment=False)
    first = ec2.associate_address(AllocationId=allocation, NetworkInterfaceId=a, PrivateIpAddress=private[0],
                                  AllowReassociation=False)
    again = ec2.associate_address(AllocationId=allocation, NetworkInterfaceId=a, PrivateIpAddress=private[0],
                                  AllowReassociation=False)
    stolen = code_of(ec2.associate_address, AllocationId=allocation, NetworkInterfaceId=b, PrivateIpAddress=private[1],
                     AllowReassociation=False)
    moved = ec2.associate_address(AllocationId=allocation, NetworkInterfaceId=b, PrivateIpAddress=private[1],
                                  AllowReassociation=True)
    released = code_of(ec2.release_address, AllocationId=allocation)
    ec2.disassociate_address(AssociationId=moved["AssociationId"])
    gone = code_of(ec2.disassociate_address, AssociationId=moved["AssociationId"])
    for eni, address in zip((a, b), private):
        ec2.unassign_private_ip_addresses(NetworkInterfaceId=eni, PrivateIpAddresses=[address])
        ec2.delete_tags(Resources=[allocation], Tags=[{"Key": f"vipgate.io/private/{eni}", "Value": address}])
    ec2.delete_tags(Resources=[allocation], Tags=[{"Key": "vipgate.io/cluster", "Value": "prod"},
                                                  {"Key": "vipgate.io/vip", "Value": "Service default/web"}])
    tags = [{"Key": "vipgate.io/allocated", "Value": "token"}, {"Key": "vipgate.io/cluster", "Value": "prod"},
            {"Key": "vipgate.io/vip", "Value": "Service default/new"}, {"Key": "vipgate", "Value": "public"}]
    ec2.describe_addresses(Filters=[{"Name": "tag:vipgate.io/allocated", "Values": ["token"]}])
    new = ec2.allocate_address(Domain="vpc", TagSpecifications=[{"ResourceType": "elastic-ip", "Tags": tags}])
    ec2.describe_addresses(Filters=filters(allocation_id=[new["AllocationId"]]))
    ec2.delete_tags(Resources=[new["AllocationId"]], Tags=[{"Key": "vipgate.io/cluster", "Value": "prod"},
                                                           {"Key": "vipgate.io/vip", "Value": "Service default/new"}])
    ec2.release_address(AllocationId=new["AllocationId"])
    missing = code_of(ec2.release_address, AllocationId=new["AllocationId"])
    six = "2001:db8::40"
    ec2.describe_network_interfaces(Filters=[{"Name": "ipv6-addresses.ipv6-address", "Values": [six]}])
    ec2.assign_ipv6_addresses(NetworkInterfaceId=a, Ipv6Addresses=[six])
    ec2.unassign_ipv6_addresses(NetworkInterfaceId=a, Ipv6Addresses=[six])
    limits = types[0]["NetworkInfo"]["Ipv4AddressesPerInterface"]
    print(json.dumps({
        "package": f"boto3 {boto3.__version__}",
        "found": [address["AllocationId"] for address in found],
        "primary": [interface["PrivateIpAddress"] for interface in interfaces],
        "limit": limits,
        "is_idempotent": first["AssociationId"] == again["AssociationId"],
        "is_new_association": first["AssociationId"] != moved["AssociationId"],
        "codes": {"stolen": stolen, "released": released, "gone": gone, "missing": missing},
    }))


def moto():
    from moto.server import ThreadedMotoServer
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    ec2 = client(url)
    image = ec2.describe_images()["Images"][0]["ImageId"]
    instances = [ec2.run_instances(ImageId=image, MinCount=1, MaxCount=1, InstanceType="t3.medium")["Instances"][0]
                 for _ in range(2)]
    tags = [{"ResourceType": "elastic-ip", "Tags": [{"Key": "vipgate", "Value": "public"}]}]
    address = ec2.allocate_address(Domain="vpc", TagSpecifications=tags)
    print(json.dumps({
        "url": url,
        "instances": [instance["InstanceId"] for instance in instances],
        "enis": [instance["NetworkInterfaces"][0]["NetworkInterfaceId"] for instance in instances],
        "allocation": address["AllocationId"],
        "public": address["PublicIp"],
    }), flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    if sys.argv[1:2] == ["flow"]:
        flow(sys.argv[2], json.loads(sys.argv[3]))
    elif sys.argv[1:] == ["moto"]:
        moto()
    else:
        sys.exit(__doc__)
