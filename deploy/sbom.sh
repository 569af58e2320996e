#!/bin/sh
# Prints the software bill of materials of the container image, as SPDX 2.3 in JSON. Needs only what
# every Debian image has: a shell, dpkg-query, awk and sha256sum.
#
#   deploy/sbom.sh --version VERSION --linked FILE --compiled FILE [--created TIME] [--os FILE]
#                  [--installed FILE]
#
#   --version    the version of moeserve
#   --linked     names of the packages whose shared libraries the program links, one per line
#   --compiled   packages whose headers or static libraries are compiled into the program
#   --created    time of creation, YYYY-MM-DDThh:mm:ssZ (default 1970-01-01T00:00:00Z: unknown)
#   --os         the os-release file (default /etc/os-release)
#   --installed  the packages of the image (default: asks dpkg)
#
# Lists of packages have one line for each, with tabs between name, version, architecture, source
# package and its version: what "deploy/sbom.sh --packages [NAME...]" prints.
set -eu

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# packages [NAME...]: prints the installed packages.
packages() {
  # shellcheck disable=SC2016  # dpkg-query expands these.
  format='${db:Status-Abbrev}\t${Package}\t${Version}\t${Architecture}'
  # shellcheck disable=SC2016
  format="$format"'\t${source:Package}\t${source:Version}\n'
  dpkg-query --show --showformat "$format" "$@" |
    awk -F '\t' -v OFS='\t' '$1 ~ /^ii/ {print $2, $3, $4, $5, $6}' |
    LC_ALL=C sort -u
}

if [ "${1:-}" = --packages ]; then
  shift
  packages "$@"
  exit
fi

version='' linked='' compiled='' installed='' os=/etc/os-release
created=1970-01-01T00:00:00Z
while [ $# -gt 1 ]; do
  case $1 in
    --version) version=$2 ;;
    --linked) linked=$2 ;;
    --compiled) compiled=$2 ;;
    --created) created=$2 ;;
    --os) os=$2 ;;
    --installed) installed=$2 ;;
    *) die "unknown option $1" ;;
  esac
  shift 2
done
[ $# -eq 0 ] || die "the option $1 lacks a value"
if [ -z "$version" ] || [ -z "$linked" ] || [ -z "$compiled" ]; then
  die "expected --version, --linked and --compiled"
fi
echo "$created" | grep -qE '^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$' ||
  die "--created: expected YYYY-MM-DDThh:mm:ssZ, found $created"
for file in "$linked" "$compiled" "$os" ${installed:+"$installed"}; do
  [ -r "$file" ] || die "$file cannot be read"
done

work=$(mktemp)
trap 'rm -f "$work"' EXIT
if [ -n "$installed" ]; then cat "$installed" >"$work"; else packages >"$work"; fi
[ -s "$work" ] || die "no package is installed"
# The digest makes the name of the document unique to its contents.
digest=$({ echo "$version"; cat "$linked" "$compiled" "$work"; } | sha256sum | cut -d ' ' -f 1)
# shellcheck disable=SC1090
distribution=$(. "$os" && echo "$ID")
# shellcheck disable=SC1090
release=$(. "$os" && echo "${VERSION_ID:-}")
case $distribution in
  debian | ubuntu) ;;
  *) die "$os: expected Debian or Ubuntu, found $distribution" ;;
esac

awk -F '\t' -v version="$version" -v created="$created" -v digest="$digest" \
  -v linked="$linked" -v compiled="$compiled" -v distribution="$distribution" \
  -v release="$release" '
  function quoted(text) {
    gsub(/[\\"]/, "\\\\&", text)
    return "\"" text "\""
  }
  # Percent-encodes what versions of packages contain and package URLs do not allow.
  function encoded(text) {
    gsub(/%/, "%25", text)
    gsub(/\+/, "%2B", text)
    gsub(/:/, "%3A", text)
    gsub(/~/, "%7E", text)
    return text
  }
  # Identifiers have only letters, digits, "." and "-"; the number keeps them apart.
  function identifier(kind, name) {
    gsub(/[^a-zA-Z0-9.-]/, "-", name)
    return "SPDXRef-" kind "-" ++identifiers "-" name
  }
  function relate(from, type, to) {
    relations = relations (relations == "" ? "" : ",\n") \
      "    {\"spdxElementId\": \"" from "\", \"relationshipType\": \"" type \
      "\", \"relatedSpdxElement\": \"" to "\"}"
  }
  function add(id, name, found, licence, purpose, more) {
    if (printed++) printf ",\n"
    printf "    {\"SPDXID\": \"%s\", \"name\": %s", id, quoted(name)
    printf ", \"versionInfo\": %s", quoted(found)
    printf ", \"downloadLocation\": \"NOASSERTION\", \"filesAnalyzed\": false"
    printf ", \"licenseConcluded\": \"%s\", \"licenseDeclared\": \"%s\"", licence, licence
    printf ", \"copyrightText\": \"NOASSERTION\""
    printf ", \"primaryPackagePurpose\": \"%s\"%s}", purpose, more
  }
  function add_package(kind,   id, source) {
    if (NF != 5) {
      printf "error: %s: line %d: expected 5 columns, found %d\n", FILENAME, FNR, NF >"/dev/stderr"
      failed = 1
      exit 1
    }
    id = identifier(kind, $1)
    source = "built from the source package " $4 " " $5
    add(id, $1, $2, "NOASSERTION", "LIBRARY", ", \"sourceInfo\": " quoted(source) \
      ", \"externalRefs\": [{\"referenceCategory\": \"PACKAGE-MANAGER\"" \
      ", \"referenceType\": \"purl\"" \
      ", \"referenceLocator\": " quoted("pkg:deb/" distribution "/" encoded($1) "@" encoded($2) \
        "?arch=" $3 "&distro=" distribution "-" release) "}]")
    return id
  }
  BEGIN {
    image = "SPDXRef-Image"
    program = "SPDXRef-Program"
    while ((getline name <linked) > 0) if (name != "") links[name] = 1
    printf "{\n  \"spdxVersion\": \"SPDX-2.3\",\n  \"dataLicense\": \"CC0-1.0\",\n"
    printf "  \"SPDXID\": \"SPDXRef-DOCUMENT\",\n  \"name\": %s,\n", quoted("moeserve-" version)
    printf "  \"documentNamespace\": %s,\n",
      quoted("https://spdx.org/spdxdocs/moeserve-" version "-" digest)
    printf "  \"creationInfo\": {\"created\": \"%s\", \"creators\": [%s]},\n", created,
      quoted("Tool: moeserve-sbom-" version)
    printf "  \"packages\": [\n"
    add(image, "moeserve-image", version, "NOASSERTION", "CONTAINER", "")
    add(program, "moeserve", version, "Apache-2.0", "APPLICATION", "")
    relate("SPDXRef-DOCUMENT", "DESCRIBES", image)
    relate(image, "CONTAINS", program)
  }
  FILENAME == compiled { relate(add_package("Build"), "BUILD_DEPENDENCY_OF", program) }
  FILENAME != compiled {
    id = add_package("Package")
    relate(image, "CONTAINS", id)
    if ($1 in links) {
      relate(program, "DYNAMIC_LINK", id)
      delete links[$1]
    }
  }
  END {
    if (failed) exit 1
    for (name in links) {
      printf "error: the program links %s, which is not installed\n", name >"/dev/stderr"
      exit 1
    }
    printf "\n  ],\n  \"relationships\": [\n%s\n  ]\n}\n", relations
  }' "$compiled" "$work"
