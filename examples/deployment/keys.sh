#!/bin/sh
# Make the server's certificates and the devices' keys, with openssl and ssh-keygen (Linux, macOS).
#
#   ./keys.sh server fleet.example.org   certs/: a CA, the SuperLink's certificate (localhost), the proxy's (the public name)
#   ./keys.sh device device-1            devices/device-1/: the device's key; send only its .pub to the operator
#
# ca.key, superlink.key and proxy.key stay on the server, ca.crt goes to every device. Existing files are never overwritten.
set -eu
umask 077
DAYS=365

usage() {
    echo "usage: ./keys.sh server PUBLIC_NAME | device NAME" >&2
    exit 2
}

refuse_if_there() {
    if [ -e "$1" ]; then
        echo "$1 already exists; nothing was written" >&2
        exit 1
    fi
}

# certificate NAME SUBJECT_ALTERNATIVE_NAMES: a key and a certificate of the CA.
certificate() {
    openssl ecparam -name prime256v1 -genkey -noout -out "certs/$1.key"
    openssl req -new -key "certs/$1.key" -subj "/CN=$1" -out "certs/$1.csr"
    printf '%s\n' "basicConstraints=critical,CA:FALSE" "keyUsage=critical,digitalSignature" "extendedKeyUsage=serverAuth" \
        "subjectAltName=$2" > "certs/$1.ext"
    openssl x509 -req -in "certs/$1.csr" -CA certs/ca.crt -CAkey certs/ca.key -set_serial "0x$(openssl rand -hex 16)" \
        -sha256 -days "$DAYS" -extfile "certs/$1.ext" -out "certs/$1.crt" 2> /dev/null
    rm "certs/$1.csr" "certs/$1.ext"
    chmod 644 "certs/$1.crt"
}

[ "$#" -eq 2 ] || usage
case "$2" in *[!A-Za-z0-9.-]* | "" | -* | .*) echo "$2: must be letters, digits, dots and hyphens" >&2 && exit 2 ;; esac
case "$1" in
server)
    refuse_if_there certs
    mkdir certs
    chmod 755 certs
    openssl ecparam -name prime256v1 -genkey -noout -out certs/ca.key
    printf '%s\n' "[req]" "distinguished_name=name" "x509_extensions=ca" "prompt=no" "[name]" "CN=flower-dp example CA" "[ca]" \
        "basicConstraints=critical,CA:TRUE,pathlen:0" "keyUsage=critical,keyCertSign,cRLSign" "subjectKeyIdentifier=hash" > certs/ca.cnf
    openssl req -x509 -new -key certs/ca.key -sha256 -days "$DAYS" -config certs/ca.cnf -out certs/ca.crt
    rm certs/ca.cnf
    chmod 644 certs/ca.crt
    certificate superlink "DNS:localhost,IP:127.0.0.1"
    certificate proxy "DNS:$2"
    ;;
device)
    refuse_if_there "devices/$2/device.key"
    mkdir -p "devices/$2"
    ssh-keygen -q -t ecdsa -b 384 -N "" -C "$2" -f "devices/$2/device.key"
    ;;
*) usage ;;
esac
