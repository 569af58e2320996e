#!/usr/bin/env bash
# Packs the program as a Debian package, which depends on the packages of the libraries that the
# program links.
#
#   deploy/package_deb.sh [--build FOLDER] [--output FOLDER]
#
#   --build FOLDER   the build folder, in which the target moeserve is built (default: build/release)
#   --output FOLDER  where to put moeserve_VERSION_ARCHITECTURE.deb (default: build/packages)
#
# The package is for the release of Debian or Ubuntu on which it is made. It installs what
# `cmake --install` installs, and /etc/moeserve with an example; it starts no service. Files have the
# time of the last commit, or of SOURCE_DATE_EPOCH, so the same commit and packages give the same file.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build/release
output=$root/build/packages
readonly maintainer="moeserve developers <moeserve@example.com>"

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

while (($# > 0)); do
  case $1 in
    --build) build=$(realpath -m "${2:?--build: expected a folder}") && shift 2 ;;
    --output) output=$(realpath -m "${2:?--output: expected a folder}") && shift 2 ;;
    *) die "unknown argument $1 (expected --build or --output)" ;;
  esac
done
for tool in cmake dpkg-deb dpkg-shlibdeps gzip strip; do
  command -v "$tool" >/dev/null || die "$tool is not installed (dpkg-shlibdeps: package dpkg-dev)"
done
[[ -x $build/moeserve ]] || die "$build/moeserve is missing: build it first"

version=$("$build/moeserve" --version | awk '{print $2}')-1
architecture=$(dpkg --print-architecture)
time=${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct 2>/dev/null || echo 0)}
export SOURCE_DATE_EPOCH=$time

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
stage=$work/debian/moeserve
doc=$stage/usr/share/doc/moeserve
umask 022

# The defaults of the install folders come from the build folder, which may be for /usr/local.
DESTDIR=$stage cmake --install "$build" --prefix /usr --strip >/dev/null
mkdir -p "$stage/usr/share/zsh/vendor-completions"
mv "$stage/usr/share/zsh/site-functions/_moeserve" "$stage/usr/share/zsh/vendor-completions/"
rmdir "$stage/usr/share/zsh/site-functions"
# Debian 12 looks for units in /lib, which is a link to /usr/lib.
mkdir -p "$stage/lib"
mv "$stage/usr/lib/systemd" "$stage/lib/"
rmdir "$stage/usr/lib" 2>/dev/null || true
# `strip` of cmake keeps these sections.
strip --remove-section=.comment --remove-section=.note "$stage/usr/bin/moeserve"
install -D -m 0644 "$root/deploy/systemd/moeserve.yaml" "$stage/etc/moeserve/moeserve.yaml"

# What Debian's policy asks of documents.
rm "$doc/LICENSE"
mv "$doc/CHANGELOG.md" "$doc/changelog"
{
  printf 'moeserve (%s) unstable; urgency=medium\n\n  * See changelog.gz.\n\n -- %s  %s\n' \
    "$version" "$maintainer" "$(date -u -R -d "@$time")"
} >"$doc/changelog.Debian"
{
  printf 'Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n'
  printf 'Upstream-Name: moeserve\n\nFiles: *\nCopyright: %s the moeserve developers\n' \
    "$(date -u +%Y -d "@$time")"
  printf 'License: Apache-2.0\n\nLicense: Apache-2.0\n'
  printf ' On Debian systems, the full text of the Apache License 2.0 is in\n'
  printf ' /usr/share/common-licenses/Apache-2.0.\n'
} >"$doc/copyright"
# The licences of libraries whose headers are compiled into the program.
mkdir "$doc/third-party"
for package in libcli11-dev nlohmann-json3-dev libspdlog-dev libfmt-dev libboost1.81-dev \
  libboost1.83-dev; do
  if [[ -f /usr/share/doc/$package/copyright ]]; then
    cp "/usr/share/doc/$package/copyright" "$doc/third-party/$package"
  fi
done
gzip -9 --no-name "$doc/changelog" "$doc/changelog.Debian" "$stage"/usr/share/man/man1/*.1

# The package is not meant for Debian's archive, so no bug asks for its upload.
mkdir -p "$stage/usr/share/lintian/overrides"
printf 'moeserve: initial-upload-closes-no-bugs\n' >"$stage/usr/share/lintian/overrides/moeserve"

mkdir "$stage/DEBIAN"
printf '/etc/moeserve/moeserve.yaml\n' >"$stage/DEBIAN/conffiles"
# The unit lets the server read the keys and certificates of a group, which must exist.
cat >"$stage/DEBIAN/postinst" <<'END'
#!/bin/sh
set -e
if [ "$1" = configure ]; then
  if ! getent group moeserve-secrets >/dev/null; then
    groupadd --system moeserve-secrets
  fi
  if [ -d /run/systemd/system ]; then
    systemctl --system daemon-reload || true
  fi
fi
END
cat >"$stage/DEBIAN/prerm" <<'END'
#!/bin/sh
set -e
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
  deb-systemd-invoke stop moeserve.service >/dev/null || true
fi
END
cat >"$stage/DEBIAN/postrm" <<'END'
#!/bin/sh
set -e
if [ -d /run/systemd/system ]; then
  systemctl --system daemon-reload || true
fi
if [ "$1" = purge ] && getent group moeserve-secrets >/dev/null && command -v groupdel >/dev/null; then
  groupdel moeserve-secrets || true
fi
END
chmod 0755 "$stage"/DEBIAN/p*

# dpkg-shlibdeps reads a source package's control file.
printf 'Source: moeserve\n\nPackage: moeserve\nArchitecture: any\n' >"$work/debian/control"
depends=$(cd "$work" && dpkg-shlibdeps -O debian/moeserve/usr/bin/moeserve 2>/dev/null |
  sed -n 's/^shlibs:Depends=//p')
[[ -n $depends ]] || die "dpkg-shlibdeps found no libraries"
cat >"$stage/DEBIAN/control" <<END
Package: moeserve
Version: $version
Architecture: $architecture
Maintainer: $maintainer
Installed-Size: $(du -k -s --apparent-size --exclude DEBIAN "$stage" | cut -f1)
Depends: $depends, passwd
Recommends: bash-completion
Section: science
Priority: optional
Description: inference server for mixture-of-experts language models
 moeserve serves trained checkpoints of sparse mixture-of-experts models, such
 as Mixtral, OLMoE, Qwen-MoE, DeepSeek, X-MoE, MH-MoE, MoA and HMoE, and of
 dense models, over OpenAI-compatible HTTP and gRPC.
 .
 The results of a request are bit-identical whatever other requests are
 running, and the work of every expert is counted exactly. The program also
 inspects, converts, quantizes and scores checkpoints without a server.
END
(cd "$stage" && find . -type f ! -path './DEBIAN/*' -printf '%P\0' | sort -z |
  xargs -0 md5sum >DEBIAN/md5sums)
find "$stage" -exec touch --no-dereference --date="@$time" {} +
mkdir -p "$output"
file=$output/moeserve_${version}_${architecture}.deb
dpkg-deb --build --root-owner-group "$stage" "$file" >/dev/null
printf '%s\n' "$file"
