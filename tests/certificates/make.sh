#!/bin/sh
# Makes the certificates of the tests, once: their CA signs nothing else, and its key is not kept.
set -eu
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
: >"$work/index"
cat >"$work/config" <<END
[ca]
default_ca = tests
[tests]
database = $work/index
new_certs_dir = $work
rand_serial = yes
unique_subject = no
default_md = sha256
policy = any
[any]
commonName = supplied
[root]
basicConstraints = critical,CA:TRUE
keyUsage = critical,keyCertSign,cRLSign
[server]
basicConstraints = CA:FALSE
subjectAltName = DNS:localhost,IP:127.0.0.1
[client]
basicConstraints = CA:FALSE
extendedKeyUsage = clientAuth
END
sign() { # name, common name, section of extensions, last day, further options
    name=$1 subject=$2 section=$3 end=$4
    shift 4
    [ -f "$name.key" ] || openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$name.key"
    openssl req -new -config /dev/null -key "$name.key" -subj "/CN=$subject" -out "$work/request"
    openssl ca -batch -notext -config "$work/config" -extensions "$section" -in "$work/request" \
        -startdate 20200101000000Z -enddate "${end}000000Z" -out "$name.pem" "$@"
}
sign ca "expertd tests" root 21200101 -selfsign -keyfile ca.key
for name in server second; do
    sign $name localhost server 21200101 -cert ca.pem -keyfile ca.key
done
sign client caller client 21200101 -cert ca.pem -keyfile ca.key
cp server.key expired.key
sign expired localhost server 20200102 -cert ca.pem -keyfile ca.key
rm ca.key expired.key
