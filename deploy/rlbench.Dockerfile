# syntax=docker/dockerfile:1
# RLBench's "Water Plants" under this project: Ubuntu 22.04, Python 3.11, Xvfb, CoppeliaSim 4.1.0 Edu, PyRep and RLBench.
# Written against their sources and documentation; this recipe has been linted, it has not been built yet.
#
# Nothing with a licence of its own is fetched behind your back: you download CoppeliaSim and accept its licence, and
# name the folder that holds the archive.  RLBench is for non-commercial use by the person who accepted its licence
# (docs/rlbench.md), so keep the image to yourself: do not push it where others can pull it.
#
#   docker build -f deploy/rlbench.Dockerfile --build-context coppeliasim=$HOME/Downloads -t wamrl-rlbench .
#   docker run --rm --shm-size=2g wamrl-rlbench                              # wamrl doctor
#   docker run --rm --shm-size=2g -v $PWD/runs:/runs wamrl-rlbench train --config FILE --run-dir /runs/NAME
FROM ubuntu:22.04 AS base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive
# Python 3.11: Ubuntu's own package is a release candidate.  Xvfb with Mesa draws on the CPU; the xcb libraries are what
# CoppeliaSim's bundled Qt loads; OSMesa is for this project's MuJoCo environments.
# hadolint ignore=DL3008  # Ubuntu keeps no old versions to pin
RUN apt-get update \
    && apt-get install -y --no-install-recommends software-properties-common gpg-agent \
    && add-apt-repository -y ppa:deadsnakes/ppa \
    && apt-get install -y --no-install-recommends \
        python3.11 python3.11-venv \
        xvfb libgl1 libgl1-mesa-dri libglx-mesa0 libosmesa6 \
        libdbus-1-3 libfontconfig1 libfreetype6 libglib2.0-0 libsm6 libx11-xcb1 libxext6 libxi6 libxrender1 \
        libxcb-icccm4 libxcb-image0 libxcb-keysyms1 libxcb-randr0 libxcb-render-util0 libxcb-shape0 libxcb-sync1 \
        libxcb-xfixes0 libxcb-xinerama0 libxcb-xkb1 libxkbcommon0 libxkbcommon-x11-0 \
    && apt-get purge -y --auto-remove software-properties-common gpg-agent \
    && rm -rf /var/lib/apt/lists/*
# Not LD_LIBRARY_PATH: the simulator's process gets it from its keeper, CoppeliaSim's libraries are for no other.
ENV COPPELIASIM_ROOT=/opt/CoppeliaSim_Edu_V4_1_0_Ubuntu20_04 \
    PATH=/opt/venv/bin:$PATH

FROM base AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc git libc6-dev libffi-dev python3.11-dev xz-utils \
    && rm -rf /var/lib/apt/lists/*
# The archive never becomes a layer.  PyRep's build writes into this folder (a link to the library, a Lua add-on).
RUN --mount=type=bind,from=coppeliasim,target=/archives \
    mkdir -p "$COPPELIASIM_ROOT" \
    && tar -xf /archives/CoppeliaSim_Edu_V4_1_0_Ubuntu20_04.tar.xz -C "$COPPELIASIM_ROOT" --strip-components 1
WORKDIR /src
COPY constraints.txt ./
COPY requirements requirements
RUN python3.11 -m venv /opt/venv \
    && pip install --no-cache-dir -c constraints.txt "setuptools>=77" wheel cffi \
    && pip install --no-cache-dir -c constraints.txt --no-build-isolation --no-deps -r requirements/rlbench.txt
COPY . .
RUN pip install --no-cache-dir -c constraints.txt .

FROM base
# Xvfb cannot make its folder of sockets without root.
RUN useradd --create-home --uid 1000 wamrl && install -d -m 1777 /tmp/.X11-unix
COPY --from=build /opt/venv /opt/venv
# CoppeliaSim writes settings beside its binaries.
COPY --from=build --chown=1000:1000 $COPPELIASIM_ROOT $COPPELIASIM_ROOT
USER 1000
WORKDIR /home/wamrl
ENTRYPOINT ["wamrl"]
CMD ["doctor"]
