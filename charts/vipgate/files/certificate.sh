#!/bin/sh
# Copies the certificate and key of the node's gateway from its Secret to the node: now, and when they are renewed.
#
# The gateway's pod reads them in `current`, whose files change together: it is a link.
set -eu
umask 077
secret=/secret
directory=/certificate
chmod 700 $directory
trap 'exit 0' TERM

is_current() {
  for file in ca.crt tls.crt tls.key; do
    cmp -s "$secret/$file" "$directory/current/$file" || return 1
  done
}

copy_certificate() {
  new=$(mktemp -d $directory/pair.XXXXXX)
  cp "$secret/ca.crt" "$secret/tls.crt" "$secret/tls.key" "$new"
  # Relative: the gateway's pod has the directory at another path.
  ln -s "${new##*/}" "$new.link"
  mv -T "$new.link" $directory/current
  # Those before, also of a copy that was interrupted.
  for other in $directory/pair.*; do
    [ "$other" = "$new" ] || rm -rf "$other"
  done
}

while :; do
  if [ ! -e $secret/ca.crt ] || [ ! -e $secret/tls.crt ] || [ ! -e $secret/tls.key ]; then
    echo "the Secret must have ca.crt, tls.crt and tls.key: waiting" >&2
  elif ! is_current; then
    copy_certificate
    echo "the certificate of this node's gateway is copied"
  fi
  sleep 30 &
  wait $!
done
