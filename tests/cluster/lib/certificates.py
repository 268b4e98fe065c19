"""Certificates for tests: authorities, and certificates of servers and of a cluster's processes, made by openssl."""

import os
import subprocess

# The names of the roles in a cluster: see runtime/src/tls/roles.rs.
ROLES = {role: f"{role}.tutti.internal" for role in ("conductor", "worker", "router")}
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def openssl(*args):
    subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True)


def replace(new, path):
    """Replaces a file atomically, as an update of a Kubernetes secret does."""
    os.replace(new, path)


class Authority:
    """A certificate authority with its files in `directory`."""

    def __init__(self, directory, name="authority"):
        self.directory, self.name = directory, name
        self.ca, self.key = directory / f"{name}.pem", directory / f"{name}.key"
        openssl("req", "-x509", *NEW_KEY, "-keyout", self.key, "-out", self.ca, "-subj", f"/CN={name}", "-days", 2)

    def issue(self, name, *hosts, days=2):
        """Writes a certificate for these hosts, and returns (its file, its key's file). With `days=0` it expires within
        a second."""
        cert, key = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        new = {path: path.with_suffix(path.suffix + ".new") for path in (cert, key)}
        request, extensions = self.directory / f"{name}.csr", self.directory / f"{name}.ext"
        alternatives = [f"IP:{host}" if host[0].isdigit() else f"DNS:{host}" for host in hosts]
        extensions.write_text(f"subjectAltName={','.join(alternatives)}\n")
        openssl("req", *NEW_KEY, "-keyout", new[key], "-out", request, "-subj", f"/CN={name}")
        signing = ("-CA", self.ca, "-CAkey", self.key, "-CAcreateserial", "-days", days, "-extfile", extensions)
        openssl("x509", "-req", "-in", request, *signing, "-out", new[cert])
        for path in (key, cert):
            replace(new[path], path)
        return cert, key

    def public(self):
        """Returns the flags of a server with a certificate for 127.0.0.1."""
        cert, key = self.issue("public", "127.0.0.1", "localhost")
        return ("--tls-cert", cert, "--tls-key", key)

    def inside(self, *roles, name=None, days=2):
        """Returns the flags of a process with a certificate for these roles."""
        cert, key = self.issue(name or "-".join(roles), *(ROLES[role] for role in roles), days=days)
        return ("--cluster-tls-cert", cert, "--cluster-tls-key", key, "--cluster-tls-ca", self.ca)
