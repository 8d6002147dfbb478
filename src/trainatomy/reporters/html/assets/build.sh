#!/bin/sh
# Builds echarts.min.js from the charts that reports use.  Needs npm; run it in this folder.
set -eu
here=$PWD
folder=$(mktemp -d)
cd "$folder"
npm install --no-audit --no-fund --ignore-scripts echarts@6.1.0 esbuild@0.28.2
cp "$here/echarts.entry.js" entry.js
npx esbuild entry.js --bundle --minify --format=iife --global-name=echarts --legal-comments=none \
  --banner:js="/* Apache ECharts 6.1.0, Apache License 2.0, https://echarts.apache.org */" \
  --outfile="$here/echarts.min.js"
