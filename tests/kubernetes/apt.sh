# For scripts that build from Debian's packages: apt, with lists and a cache of its own, so nothing of the system changes.
#
#   source apt.sh FOLDER RELEASE TYPES     # TYPES: "deb", or "deb deb-src"
#   apt-get "${apt[@]}" …                  # packages of this release of Debian, from where the system has its own from
mkdir -p "$1"/{lists/partial,cache/archives/partial,sources}
cat > "$1/sources/source.sources" <<END
Types: $3
URIs: $(awk '/^URIs:/ { print $2; exit }' "${DEBIAN_SOURCES:-/etc/apt/sources.list.d/debian.sources}")
Suites: $2
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
END
apt=(-o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$1/sources" -o "Dir::State::lists=$1/lists"
    -o "Dir::Cache=$1/cache" -o APT::Sandbox::User=root)
