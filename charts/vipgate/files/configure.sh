#!/bin/sh
# Prepares /etc/vipgate of a gateway: gateway.yaml for its node; and waits for the certificate of its node, if there is to be one.
set -eu
umask 077
tls=/etc/vipgate-tls

write_configuration() {
  template=/template/$NODE.gateway.yaml
  # Of a node that `gateways` doesn't list.
  [ -e "$template" ] || template=/template/gateway.yaml
  case $ADDRESS in *:*) host="[$ADDRESS]" ;; *) host=$ADDRESS ;; esac
  sed "s/@NODE@/$NODE/g; s/@ADDRESS@/$ADDRESS/g; s/@HOST@/$host/g" "$template" >/etc/vipgate/gateway.yaml
}

# Another pod on this node brings it.
wait_for_certificate() {
  trap 'exit 1' TERM
  remaining=300
  until [ -e $tls/current/tls.crt ]; do
    [ $remaining -ne 300 ] || echo "there is no certificate for node $NODE: waiting; is the node in \`gateways\`?" >&2
    [ $remaining -gt 0 ] || return 1
    remaining=$((remaining - 1))
    sleep 1 &
    wait $!
  done
}

write_configuration
if [ -d $tls ]; then
  wait_for_certificate || { echo "there is no certificate for node $NODE: add it to \`gateways\`, and see the logs of its pod" >&2; exit 1; }
fi
