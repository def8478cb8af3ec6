#!/bin/sh
# Prepares /etc/vipgate of a gateway: gateway.yaml for its node.
set -eu
umask 077
template=/template/$NODE.gateway.yaml
# Of a node that `gateways` doesn't list.
[ -e "$template" ] || template=/template/gateway.yaml
case $ADDRESS in *:*) host="[$ADDRESS]" ;; *) host=$ADDRESS ;; esac
sed "s/@NODE@/$NODE/g; s/@ADDRESS@/$ADDRESS/g; s/@HOST@/$host/g" "$template" >/etc/vipgate/gateway.yaml
