#!/bin/sh
# Prepares /etc/vipgate of a gateway: gateway.yaml for its node, and the certificate and key of its node alone.
#
#   configure.sh            before the gateway starts
#   configure.sh --follow   beside it: again when the certificate was renewed
#
# Files are copied, since kubelet removes those of a `subPath` mount when their Secret changes.
set -eu
umask 077
directory=/etc/vipgate
secret=/secret

write_configuration() {
  template=/template/$NODE.gateway.yaml
  # Of a node that `gateways` doesn't list.
  [ -e "$template" ] || template=/template/gateway.yaml
  case $ADDRESS in *:*) host="[$ADDRESS]" ;; *) host=$ADDRESS ;; esac
  sed "s/@NODE@/$NODE/g; s/@ADDRESS@/$ADDRESS/g; s/@HOST@/$host/g" "$template" >$directory/gateway.yaml
}

# Finds the node's files, or those of all nodes.
find_certificate() {
  pair=$secret/$NODE
  [ -e "$pair.crt" ] || pair=$secret/tls
  ca=$secret/$NODE.ca
  [ -e "$ca" ] || ca=$secret/ca.crt
  [ -e "$pair.crt" ] && [ -e "$pair.key" ] && [ -e "$ca" ]
}

is_current() {
  cmp -s "$ca" $directory/tls/ca.crt && cmp -s "$pair.crt" $directory/tls/tls.crt && cmp -s "$pair.key" $directory/tls/tls.key
}

# The three files change together: `tls` is a link.
copy_certificate() {
  old=$(readlink $directory/tls || true)
  new=$(mktemp -d $directory/tls.XXXXXX)
  cp "$ca" "$new/ca.crt"
  cp "$pair.crt" "$new/tls.crt"
  cp "$pair.key" "$new/tls.key"
  ln -s "$new" "$new.link"
  mv -T "$new.link" $directory/tls
  [ -z "$old" ] || rm -rf "$old"
}

if [ "${1-}" = --follow ]; then
  trap 'exit 0' TERM
  while :; do
    sleep 30 &
    wait $!
    if find_certificate && ! is_current; then
      copy_certificate
      echo "the certificate of $NODE was renewed"
    fi
  done
fi

# The Secret may get it later: kubelet updates its files within two minutes.
wait_for_certificate() {
  trap 'exit 1' TERM
  remaining=60
  until find_certificate; do
    [ $remaining -ne 60 ] || echo "the Secret has no certificate for node $NODE: waiting; is the node in \`gateways\`?" >&2
    [ $remaining -gt 0 ] || return 1
    remaining=$((remaining - 1))
    sleep 5 &
    wait $!
  done
}

write_configuration
if [ -d $secret ]; then
  wait_for_certificate || { echo "the Secret has no certificate for node $NODE: add it to \`gateways\`" >&2; exit 1; }
  copy_certificate
fi
